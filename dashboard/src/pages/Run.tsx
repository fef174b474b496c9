// One run: its curves, what it said, its rollouts and its settings.

import { TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { Link, useLocation } from "wouter";
import { useData, withParams } from "../api.ts";
import { metric, moment, seconds, textOf } from "../format.ts";
import { useNews } from "../live.ts";
import { RewardNumber, Status } from "../parts/Badges.tsx";
import { Chart, COLORS, Legend, type Series } from "../parts/Chart.tsx";
import { Id } from "../parts/Copy.tsx";
import { Icon } from "../parts/Icons.tsx";
import { DiagnosisView, Log, Verdicts } from "../parts/Verdicts.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import { stepsOf } from "../steps.ts";
import type { Run, RunEvent, StepRow } from "../types.ts";
import RolloutsPage from "./Rollouts.tsx";
import { modelName, Progress, useStatus } from "./Runs.tsx";

const TABS = [["overview", "Overview"], ["rollouts", "Rollouts"], ["log", "Log"], ["settings", "Settings"]] as const;

export default function RunPage({ id, tab }: { id: string; tab: string }) {
  const path = `/runs/${encodeURIComponent(id)}`;
  const query = useData<Run>(path);
  return (
    <Loaded query={query}>
      {(run) => (
        <>
          <Head run={run} />
          <nav className="tabs" aria-label="Parts of the run">
            {TABS.map(([name, title]) => (
              <Link key={name} href={name === "overview" ? path : `${path}/${name}`} aria-current={tab === name ? "page" : undefined}>{title}</Link>
            ))}
          </nav>
          {tab === "overview" && <Overview run={run} />}
          {tab === "rollouts" && (run.elsewhere ? <Elsewhere run={run} /> : <RolloutsPage run={id} />)}
          {tab === "log" && (run.elsewhere ? <Elsewhere run={run} /> : <Events run={run} />)}
          {tab === "settings" && <Settings run={run} />}
          {!TABS.some(([name]) => name === tab) && <Empty title="There is no such part of a run" />}
        </>
      )}
    </Loaded>
  );
}

function Elsewhere({ run }: { run: Run }) {
  return <div className="card"><Empty title="This run has a store of its own">Its rollouts are shown by <code>agl dashboard {run.elsewhere}</code></Empty></div>;
}

function Head({ run }: { run: Run }) {
  const statusOf = useStatus();
  const doing = useNews()?.runs[run.run_id]?.doing;
  return (
    <div className="head">
      <div className="grow">
        <div className="crumbs"><Link href="/">Runs</Link> / <Id value={run.run_id} whole /></div>
        <h1>{run.algorithm} <span className="muted">trains</span> {run.agent || "an agent"}</h1>
        <div className="head-facts">
          <Status value={statusOf(run)} />
          <span>on <b>{modelName(run.settings.model as string | null)}</b></span>
          <Progress done={run.state.step ?? null} of={run.steps} />
          <span>{moment(run.start_time)}</span>
          {run.end_time && <span>took <b>{seconds(run.end_time - run.start_time)}</b></span>}
          {run.status === "running" && doing && <span>{doing}</span>}
        </div>
        {run.error && <pre className="error-box prewrap" style={{ marginTop: 12 }}>{textOf(run.error)}</pre>}
      </div>
    </div>
  );
}

// ---- curves ----

const FIRST = ["failed", "entropy", "clip_fraction", "grad_norm", "kl_old", "kl_step", "loss", "tokens", "sampling_seconds", "learning_seconds", "learning_rate", "logprob_gap_max"];
const HIDDEN = new Set(["step", "time", "steps", "seconds_left", "reward", "val_reward"]);
const WORDS: Record<string, string> = {
  failed: "Failed rollouts", entropy: "Entropy", clip_fraction: "Clipped tokens (share)", grad_norm: "Gradient norm", kl_old: "KL to the sampler",
  kl_step: "KL of the step", loss: "Loss", tokens: "Sampled tokens", sampling_seconds: "Sampling (s)", learning_seconds: "Learning (s)",
  learning_rate: "Learning rate", logprob_gap_max: "Engine / learner gap", sync_gap: "Gap after the weight sync", trained_tokens: "Trained tokens",
  tree_tokens: "Tokens of the packed trees", updates: "Updates", version: "Weight version", step_seconds: "Step (s)",
};

export function curve(rows: StepRow[], name: string): [number, number][] {
  return rows.filter((row) => typeof row[name] === "number").map((row) => [row.step, row[name] as number]);
}

export function metricNames(rows: StepRow[]): string[] {
  const found = new Set(rows.flatMap((row) => Object.keys(row).filter((name) => typeof row[name] === "number" && !HIDDEN.has(name))));
  return [...FIRST.filter((name) => found.has(name)), ...[...found].filter((name) => !FIRST.includes(name)).sort()];
}

export function titleOf(name: string): string {
  return WORDS[name] ?? name.replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase());
}

function Overview({ run }: { run: Run }) {
  const path = `/runs/${encodeURIComponent(run.run_id)}`;
  const steps = useQuery(stepsOf(run.run_id));
  const events = useData<{ events: RunEvent[] }>(run.elsewhere ? null : `${path}/events`, { keep: true });
  const [, go] = useLocation();
  const [wanted, setWanted] = useState("");
  return (
    <Loaded query={steps}>
      {({ steps: rows }) => {
        if (rows.length === 0)
          return <div className="card"><Empty title="No step yet">The curves begin with the first finished step.{run.status === "running" ? " This page updates by itself." : ""}</Empty></div>;
        const rewards: Series[] = [
          { name: "training", color: COLORS[0], points: curve(rows, "reward") },
          { name: "validation", color: COLORS[1], points: curve(rows, "val_reward"), dots: true },
        ].filter((one) => one.points.length > 0);
        const toStep = (step: number) => go(withParams(`${path}/rollouts`, { step }));
        const names = metricNames(rows).filter((name) => titleOf(name).toLowerCase().includes(wanted.toLowerCase()) || name.includes(wanted.toLowerCase()));
        return (
          <div className="stack">
            <div style={{ display: "grid", gridTemplateColumns: "repeat(auto-fit, minmax(min(100%, 380px), 1fr))", gap: 14, alignItems: "start" }}>
              <section className="card card-pad" aria-label="Reward">
                <div className="card-title"><h2>Mean reward</h2><Legend series={rewards} /></div>
                <Chart title="Mean reward" series={rewards} height={260} onStep={toStep} />
                <p className="small muted" style={{ margin: "6px 0 0" }}>Click a step to see its rollouts.</p>
              </section>
              <section className="card card-pad" aria-label="Findings">
                <div className="card-title"><h2>What it comes to</h2><Link className="small link" href={`${path}/log`}>whole log</Link></div>
                <Summary rows={rows} />
                {run.elsewhere ? <p className="small muted">What it said is in its own store.</p> : <><DiagnosisView run={run} /><Loaded query={events}>{(found) => <Verdicts events={found.events} most={4} />}</Loaded></>}
              </section>
            </div>
            <div className="row wrap" style={{ justifyContent: "space-between" }}>
              <h2>Metrics</h2>
              <TextInput size="xs" placeholder="Find a metric" aria-label="Find a metric" leftSection={<Icon name="search" size={14} />} value={wanted} onChange={(e) => setWanted(e.currentTarget.value)} />
            </div>
            <div className="charts">
              {names.map((name) => <MetricCard key={name} name={name} rows={rows} onStep={toStep} />)}
              {names.length === 0 && <p className="muted">No metric is called like that.</p>}
            </div>
          </div>
        );
      }}
    </Loaded>
  );
}

function MetricCard({ name, rows, onStep }: { name: string; rows: StepRow[]; onStep: (step: number) => void }) {
  const points = useMemo(() => curve(rows, name), [rows, name]);
  const last = points[points.length - 1];
  return (
    <section className="card card-pad" aria-label={titleOf(name)}>
      <div className="card-title"><span className="small muted" title={name}>{titleOf(name)}</span><b className="small">{last ? metric(last[1]) : "–"}</b></div>
      <Chart title={titleOf(name)} series={[{ name: titleOf(name), color: COLORS[0], points }]} height={118} onStep={onStep} />
    </section>
  );
}

function Summary({ rows }: { rows: StepRow[] }) {
  const rewards = curve(rows, "reward");
  const validated = curve(rows, "val_reward");
  const best = validated.reduce<[number, number] | null>((top, one) => (top === null || one[1] > top[1] ? one : top), null);
  const of = (label: string, value: number | null | undefined, note?: string) => (
    <div className="tile" key={label} style={{ padding: "4px 0 12px" }}>
      <div className="label">{label}</div>
      <div className="metric-now"><RewardNumber value={value} /></div>
      {note && <div className="small muted">{note}</div>}
    </div>
  );
  return (
    <div className="tiles">
      {of("Reward now", rewards[rewards.length - 1]?.[1], rewards.length > 1 ? `began at ${metric(rewards[0][1])}` : undefined)}
      {validated.length > 0 && of("Validation now", validated[validated.length - 1][1], validated.length > 1 ? `began at ${metric(validated[0][1])}` : undefined)}
      {best && validated.length > 2 && of("Best validation", best[1], `at step ${best[0]}`)}
    </div>
  );
}

function Events({ run }: { run: Run }) {
  const query = useData<{ events: RunEvent[] }>(`/runs/${encodeURIComponent(run.run_id)}/events`, { keep: true });
  return <Loaded query={query}>{({ events }) => <Log events={events} />}</Loaded>;
}

function Settings({ run }: { run: Run }) {
  const [wanted, setWanted] = useState("");
  const names = Object.keys(run.settings).filter((name) => name.includes(wanted.toLowerCase())).sort();
  return (
    <div className="card">
      <div className="filters"><TextInput size="xs" placeholder="Find a setting" aria-label="Find a setting" value={wanted} onChange={(e) => setWanted(e.currentTarget.value)} /></div>
      <div className="scroll-x">
        <table className="list tight">
          <thead><tr><th>Setting of {run.algorithm}</th><th>Value</th></tr></thead>
          <tbody>
            {names.map((name) => <tr key={name}><td className="mono">{name}</td><td>{run.settings[name] === null ? <span className="muted">not set</span> : <span className="prewrap">{textOf(run.settings[name])}</span>}</td></tr>)}
            {run.state.run_dir && !wanted && <tr><td className="mono muted">folder</td><td className="mono">{run.state.run_dir}</td></tr>}
          </tbody>
        </table>
      </div>
    </div>
  );
}
