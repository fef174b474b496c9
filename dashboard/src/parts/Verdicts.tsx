// What a run said of itself: findings first, with what to do about them.

import { useQuery } from "@tanstack/react-query";
import { Link } from "wouter";
import { get } from "../api.ts";
import { clock, metric, short, textOf } from "../format.ts";
import type { Diagnosis, Finding, Run, RunEvent } from "../types.ts";
import { Empty } from "./States.tsx";

interface Said {
  severity: string;
  words: string;
  fix: string | null;
}

const TONE: Record<string, string> = { problem: "bad", error: "bad", critical: "bad", warning: "warn", verdict: "accent", good: "good", info: "", note: "", event: "" };

/** An event as a finding: doctor and why give a severity, words and a fix; other events have a text or a name. */
function findingOf(event: RunEvent): Said {
  const data = event.data;
  const words = data.words ?? data.text ?? named(data) ?? JSON.stringify(data);
  return { severity: String(data.severity ?? event.kind), words: textOf(words), fix: data.fix ? textOf(data.fix) : null };
}

/** An event by its name, with what it is about. */
function named(data: Record<string, unknown>): string | null {
  if (typeof data.name !== "string") return null;
  const about = [data.path, data.why, data.candidate].find((value) => typeof value === "string");
  return about ? `${data.name}: ${about}` : data.name;
}

export function Verdicts({ events, most }: { events: RunEvent[]; most: number }) {
  const found = events.filter((event) => event.kind === "verdict" || event.kind === "warning" || event.data.severity).slice(0, most);
  if (found.length === 0) return null;
  return <div style={{ borderTop: "1px solid var(--grid)" }}>{found.map((event, index) => <Line key={index} event={event} />)}</div>;
}

const EVERY = 30_000;

/** What the doctor says of the run; asked again now and then while it goes on. */
export function DiagnosisView({ run }: { run: Run }) {
  const path = `/why?run=${encodeURIComponent(run.run_id)}`;
  const query = useQuery<Diagnosis, Error>({ queryKey: [path], queryFn: () => get<Diagnosis>(path), staleTime: EVERY, refetchInterval: run.status === "running" ? EVERY : false });
  if (query.error) return <p className="small muted">The doctor has nothing to say: {query.error.message}</p>;
  if (!query.data) return <p className="small muted" role="status">The doctor is looking…</p>;
  const { verdict, findings } = query.data;
  const shown = findings.filter((finding) => finding.code !== "solved"); // the verdict says so
  return (
    <div>
      {shown.some((finding) => verdict.includes(finding.words)) || <p className="said" style={{ margin: "0 0 6px", fontSize: 14 }}>{textOf(verdict)}</p>}
      {shown.map((finding) => <FindingView key={finding.code} finding={finding} />)}
      <Measured numbers={query.data.measured} />
    </div>
  );
}

const share = (value: number) => `${Math.round(100 * value)} %`;
/** What the doctor measured that no curve shows: its name there, its name for people, what that means, how it is written. */
const MEASURED: [string, string, string, (value: number) => string][] = [
  ["flat_groups", "Flat groups", "Groups whose siblings all earned the same, which teach nothing", share],
  ["failed", "Failed", "Rollouts that failed", share],
  ["truncated", "Cut off", "Rollouts that ran into a limit of tokens or calls", share],
  ["masked", "Left out of updates", "Rollouts that are not learned from, because of how they ended", share],
  ["prompt_tokens_lost", "Tokens lost to breaks", "Prompt tokens computed again because a call did not continue the one before it", share],
  ["same_answers", "Same answers", "Rollouts that say word for word what a sibling said", share],
  ["repeated_phrases", "Repeat a phrase", "Rollouts that repeat a phrase over and over", share],
  ["rewarded_without_tools", "Paid without tools", "Rollouts with the highest reward that used none of their tools", share],
  ["length_reward_correlation", "Length pays", "Rank correlation of length and reward among siblings", metric],
  ["effective_sample_size", "Effective samples", "Tokens that as many equal importance weights would be", share],
  ["signal_to_noise", "Signal to noise", "Of the gradient, from two halves of a step", metric],
];

function Measured({ numbers }: { numbers: Record<string, unknown> }) {
  const known = MEASURED.filter(([name]) => typeof numbers[name] === "number");
  const tasks = numbers.reward_by_difficulty as Record<string, { groups: number }> | undefined;
  if (known.length === 0) return null;
  return (
    <dl className="measured" aria-label="Measured">
      {known.map(([name, title, meaning, written]) => <div key={name} title={meaning}><dt>{title}</dt><dd>{written(numbers[name] as number)}</dd></div>)}
      {tasks && Object.keys(tasks).length > 0 && <div className="whole"><dt>Groups rewarded</dt><dd>{Object.entries(tasks).map(([name, of]) => `${name} ${of.groups}`).join(" · ")}</dd></div>}
    </dl>
  );
}

function FindingView({ finding, links = true }: { finding: Finding; links?: boolean }) {
  const rollouts = links ? (finding.evidence.rollouts ?? []) : [];
  return (
    <div className="verdict">
      <span className={`badge ${TONE[finding.severity] ?? ""}`}>{finding.severity}</span>
      <div className="grow">
        <div className="said">{textOf(finding.words)}</div>
        {finding.fix && <div className="muted"><b>Try:</b> {textOf(finding.fix)}</div>}
        {rollouts.length > 0 && <div className="muted small">Look at {rollouts.map((id, n) => <span key={id}>{n > 0 && ", "}<Link className="link mono" href={`/rollouts/${encodeURIComponent(id)}`}>{short(id)}</Link></span>)}</div>}
      </div>
    </div>
  );
}

/** What the doctor says that names this rollout as an example. */
export function FindingsOf({ run, rollout }: { run: string; rollout: string }) {
  const path = `/why?run=${encodeURIComponent(run)}`;
  const query = useQuery<Diagnosis, Error>({ queryKey: [path], queryFn: () => get<Diagnosis>(path), staleTime: EVERY });
  const mine = query.data?.findings.filter((finding) => finding.evidence.rollouts?.includes(rollout)) ?? [];
  if (mine.length === 0) return null;
  return <section className="card card-pad" style={{ marginBottom: 16, paddingBlock: 4 }} aria-label="Findings">{mine.map((finding) => <FindingView key={finding.code} finding={finding} links={false} />)}</section>;
}

function Line({ event }: { event: RunEvent }) {
  const finding = findingOf(event);
  return (
    <div className="verdict">
      <span className={`badge ${TONE[finding.severity] ?? ""}`}>{finding.severity}</span>
      <div className="grow">
        <div className="said">{finding.words}</div>
        {finding.fix && <div className="muted"><b>Try:</b> {finding.fix}</div>}
      </div>
    </div>
  );
}

export function Log({ events }: { events: RunEvent[] }) {
  if (events.length === 0) return <div className="card"><Empty title="It said nothing yet" /></div>;
  return (
    <div className="card scroll-x">
      <table className="list">
        <thead><tr><th>Time</th><th className="num">Step</th><th>Kind</th><th>What it said</th></tr></thead>
        <tbody>
          {events.map((event, index) => {
            const finding = findingOf(event);
            return (
              <tr key={index}>
                <td className="small muted keep">{clock(event.time)}</td>
                <td className="num small muted">{typeof event.data.step === "number" ? event.data.step : (event.step ?? "–")}</td>
                <td><span className={`badge ${TONE[finding.severity] ?? ""}`}>{finding.severity}</span></td>
                <td><span className="said">{finding.words}</span>{finding.fix && <div className="muted small"><b>Try:</b> {finding.fix}</div>}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
