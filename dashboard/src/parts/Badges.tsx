// Statuses and numbers with a colour that never says anything alone.

import { reward, signed } from "../format.ts";

const KIND: Record<string, string> = {
  running: "accent", succeeded: "good", ok: "", failed: "bad", agent_error: "bad", infra_error: "bad", judge_error: "bad",
  timeout: "warn", truncated: "warn", stopped: "warn", cancelled: "", queuing: "", requeuing: "warn", preparing: "accent",
  interrupted: "warn", busy: "accent", idle: "", unknown: "",
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

export function RewardNumber({ value }: { value: number | null | undefined }) {
  if (value === null || value === undefined) return <span className="muted">–</span>;
  return <span className={value > 0 ? "num-good" : value < 0 ? "num-bad" : "muted"}>{reward(value)}</span>;
}

export function Signed({ value }: { value: number | null | undefined }) {
  if (value === null || value === undefined) return <span className="muted">–</span>;
  return <span className={value > 0 ? "num-good" : value < 0 ? "num-bad" : "muted"}>{signed(value)}</span>;
}

export function Mode({ value }: { value: string | null }) {
  return <span className="muted small">{value ?? "–"}</span>;
}
