// What a run said of itself: findings first, with what to do about them.

import { useQuery } from "@tanstack/react-query";
import { Link } from "wouter";
import { get } from "../api.ts";
import { clock, short, textOf, withUnit } from "../format.ts";
import type { Diagnosis, Finding, Run, RunEvent } from "../types.ts";
import { Title } from "./Metrics.tsx";
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

const EVERY = 30_000;

/** What the doctor says of the run; asked again now and then while it goes on. */
export function DiagnosisView({ run, events }: { run: Run; events: RunEvent[] }) {
  const path = `/why?run=${encodeURIComponent(run.run_id)}`;
  const query = useQuery<Diagnosis, Error>({ queryKey: [path], queryFn: () => get<Diagnosis>(path), staleTime: EVERY, refetchInterval: run.status === "running" ? EVERY : false });
  if (query.error) return <p className="small muted">There is no diagnosis: {query.error.message}</p>;
  if (!query.data) return <p className="small muted" role="status">The run is being examined…</p>;
  const { verdict, findings } = query.data;
  const shown = findings.filter((finding) => finding.code !== "solved"); // the verdict says so
  return (
    <div>
      {shown.some((finding) => verdict.includes(finding.words)) || <p className="said" style={{ margin: "0 0 6px", fontSize: 14 }}>{textOf(verdict)}</p>}
      {shown.map((finding) => <FindingView key={finding.code} finding={finding} />)}
      {warningsBeside(events, query.data).slice(0, 4).map((event, index) => <Line key={index} event={event} />)}
      <Measured diagnosis={query.data} />
    </div>
  );
}

function Measured({ diagnosis: { numbers, measured } }: { diagnosis: Diagnosis }) {
  const tasks = measured.reward_by_difficulty as Record<string, { groups: number }> | undefined;
  if (numbers.length === 0) return null;
  return (
    <dl className="measured" aria-label="Measured">
      {numbers.map((one) => <div key={one.name}><dt><Title metric={one} /></dt><dd>{withUnit(one.value, one.unit)}</dd></div>)}
      {tasks && Object.keys(tasks).length > 0 && <div className="whole"><dt title="Groups by how much of the range of rewards their rollouts earn on average">Groups by success</dt><dd>{Object.entries(tasks).map(([name, of]) => `${SUCCESS[name] ?? name}: ${of.groups}`).join(" · ")}</dd></div>}
    </dl>
  );
}

const SUCCESS: Record<string, string> = { never: "never solved", seldom: "seldom", often: "often", always: "always solved" };

/** Text without its numbers, in which the same sentence said at another step differs. */
const sameWords = (text: string) => text.replace(/[\d.,+−-]+/g, "#").slice(0, 60);

/** The run's own warnings that the doctor does not repeat; its verdicts of earlier steps are in the log. */
function warningsBeside(events: RunEvent[], { verdict, findings }: Diagnosis): RunEvent[] {
  const said = new Set([verdict, ...findings.map((finding) => finding.words)].map(sameWords));
  return events.filter((event) => {
    const words = sameWords(findingOf(event).words);
    if (event.kind !== "warning" || said.has(words)) return false;
    said.add(words);
    return true;
  });
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
  if (events.length === 0) return <div className="card"><Empty title="No message yet" /></div>;
  return (
    <div className="card scroll-x" tabIndex={0}>
      <table className="list">
        <thead><tr><th>Time</th><th className="num">Step</th><th>Kind</th><th>Message</th></tr></thead>
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
