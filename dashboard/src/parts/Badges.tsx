// Statuses and numbers with a colour that never says anything alone.

import { useData } from "../api.ts";
import { reward, signed, textOf } from "../format.ts";
import type { RewardRange, Standing } from "../types.ts";

const KIND: Record<string, string> = {
  running: "accent", succeeded: "good", ok: "", failed: "bad", agent_error: "bad", infra_error: "bad", judge_error: "bad",
  timeout: "warn", truncated: "warn", stopped: "warn", cancelled: "", queuing: "", requeuing: "warn", preparing: "accent",
  busy: "accent", idle: "", unknown: "",
};

export function Status({ value }: { value: string | null | undefined }) {
  if (!value) return <span className="muted">–</span>;
  return (
    <span className={`badge ${KIND[value] ?? ""}`}>
      <span className={`dot ${value === "running" ? "pulse" : ""}`} />
      {value.replace("_", " ")}
    </span>
  );
}

const STANDING: Record<string, string> = { running: "accent", succeeded: "good", "stopped by you": "warn", stopped: "warn", failed: "bad", died: "bad", ended: "" };

/** How a run stands; why it is so is beside it where there is room, else it is shown on hover. */
export function StandingBadge({ value, long = false }: { value: Standing; long?: boolean }) {
  return (
    <span className="row" style={{ gap: 8 }}>
      <span className={`badge ${STANDING[value.word] ?? ""}`} title={value.why ? textOf(value.why) : undefined}>
        <span className={`dot ${value.word === "running" ? "pulse" : ""}`} />
        {value.word}
      </span>
      {value.why && <span className={long ? "small muted isolate" : "clip small muted why"} title={textOf(value.why)}>{textOf(value.why).split("\n")[0]}</span>}
    </span>
  );
}

/** A reward; in the upper third of `range` it is green, in the lower third red. */
export function RewardNumber({ value, range }: { value: number | null | undefined; range?: RewardRange | null }) {
  if (value === null || value === undefined) return <span className="muted">–</span>;
  const [low, high] = [range?.low ?? null, range?.high ?? null];
  const part = low === null || high === null || high <= low ? null : (value - low) / (high - low);
  return <span className={part === null ? "num-plain" : part >= 2 / 3 ? "num-good" : part <= 1 / 3 ? "num-bad" : "num-plain"}>{reward(value)}</span>;
}

/** The range of rewards of a run, which colours are relative to. */
export function useRange(run: string | null | undefined): RewardRange | null {
  return useData<RewardRange>(run ? `/runs/${encodeURIComponent(run)}/rewards` : null).data ?? null;
}

export function Signed({ value }: { value: number | null | undefined }) {
  if (value === null || value === undefined) return <span className="muted">–</span>;
  return <span className={value > 0 ? "num-good" : value < 0 ? "num-bad" : "muted"}>{signed(value)}</span>;
}
