// One run: its curves, what it said, its rollouts and its settings.

import { TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { Link, useLocation } from "wouter";
import { useData, withParams } from "../api.ts";
import { metric, moment, seconds, textOf } from "../format.ts";
import { useNews } from "../live.ts";
import { StandingBadge } from "../parts/Badges.tsx";
import { Chart, COLORS, Legend, type Series } from "../parts/Chart.tsx";
import { Id } from "../parts/Copy.tsx";
import { curve, MetricGroups, validation } from "../parts/Metrics.tsx";
import { DiagnosisView, Log } from "../parts/Verdicts.tsx";
import { Empty, Loaded } from "../parts/States.tsx";
import { stepsOf } from "../steps.ts";
import type { Run, RunEvent, StepRow } from "../types.ts";
import RolloutsPage from "./Rollouts.tsx";
import { modelName, Progress } from "./Runs.tsx";

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
  const rows = useQuery(stepsOf(run.run_id)).data?.steps;
  const resumed = rows !== undefined && rows.length > 0 && rows[0].time < run.start_time;
  const doing = useNews()?.runs[run.run_id]?.doing;
  return (
    <div className="head">
      <div className="grow">
        <div className="crumbs"><Link href="/">Runs</Link> / <Id value={run.run_id} whole /></div>
        <h1 className="isolate">{run.name}</h1>
        <div className="head-facts">
          <StandingBadge value={run.error ? { ...run.standing, why: null } : run.standing} long />
          <span><b>{run.algorithm}</b> trains <b>{run.agent || "an agent"}</b> on <b>{modelName(run.settings.model as string | null)}</b></span>
          <Progress done={run.state.step ?? null} of={run.steps} />
          <span>{moment(run.start_time)}</span>
          {run.end_time && <span>took <b>{seconds(run.end_time - run.start_time)}</b>{resumed && " since it was resumed"}</span>}
          {run.status === "running" && doing && <span>{doing}</span>}
        </div>
        {run.error && <pre className="error-box prewrap" style={{ marginTop: 12 }}>{run.standing.word}: {textOf(run.error)}</pre>}
      </div>
    </div>
  );
}

function Overview({ run }: { run: Run }) {
  const path = `/runs/${encodeURIComponent(run.run_id)}`;
  const steps = useQuery(stepsOf(run.run_id));
  const events = useData<{ events: RunEvent[] }>(run.elsewhere ? null : `${path}/events`, { keep: true });
  const [, go] = useLocation();
  return (
    <Loaded query={steps}>
      {({ steps: rows, metrics }) => {
        if (rows.length === 0)
          return <div className="card"><Empty title="No step yet">The curves begin with the first finished step.{run.status === "running" ? " This page updates by itself." : ""}</Empty></div>;
        const toStep = run.elsewhere ? undefined : (step: number) => go(withParams(`${path}/rollouts`, { step }));
        return (
          <div className="stack">
            <div className="halves">
              <Headline rows={rows} onStep={toStep} />
              <section className="card card-pad" aria-label="Findings">
                <div className="card-title"><h2>Results and findings</h2><Link className="small link" href={`${path}/log`}>all messages</Link></div>
                <Summary rows={rows} />
                {run.elsewhere ? <p className="small muted">The run's messages are in its own store.</p> : <DiagnosisView run={run} events={events.data?.events ?? []} />}
              </section>
            </div>
            <MetricGroups runs={[{ name: run.name, color: COLORS[0], rows }]} metrics={metrics} onStep={toStep} />
          </div>
        );
      }}
    </Loaded>
  );
}

/** What the run is about: rewards where there are any, else the loss of the examples. */
function Headline({ rows, onStep }: { rows: StepRow[]; onStep?: (step: number) => void }) {
  const rewards: Series[] = [{ name: "training", color: COLORS[0], points: curve(rows, "reward") }, validation(rows, "validation (95 % interval)", COLORS[1])];
  const loss: Series[] = [{ name: "loss", color: COLORS[0], points: curve(rows, "loss") }];
  const earns = rewards[0].points.length > 0 || loss[0].points.length === 0;
  const charts: [string, Series[]][] = earns ? [["Mean reward", rewards]] : [["Loss of the examples", loss], ["Mean reward", [rewards[1]]]];
  return (
    <section className="card card-pad" aria-label={earns ? "Reward" : "Loss"}>
      {charts.map(([title, all]) => [title, all.filter((one) => one.points.length > 0)] as const).filter(([, series]) => series.length > 0).map(([title, series], _, shown) => (
        <div key={title}>
          <div className="card-title wrap"><h2>{title}</h2><Legend series={series} /></div>
          <Chart title={title} series={series} height={shown.length > 1 ? 160 : 260} onStep={onStep} />
        </div>
      ))}
      {onStep && <p className="small muted" style={{ margin: "6px 0 0" }}>Click a step to see its rollouts.</p>}
    </section>
  );
}

function Summary({ rows }: { rows: StepRow[] }) {
  const [rewards, losses, validated] = ["reward", "loss", "val_reward"].map((name) => curve(rows, name));
  const best = validated.reduce<[number, number] | null>((top, one) => (top === null || one[1] > top[1] ? one : top), null);
  const of = (label: string, value: number, note?: string) => (
    <div className="tile" key={label} style={{ padding: "4px 0 12px" }}>
      <div className="label">{label}</div>
      <div className="metric-now">{metric(value)}</div>
      {note && <div className="small muted">{note}</div>}
    </div>
  );
  const now = (label: string, points: [number, number][]) => points.length > 0 && of(label, points[points.length - 1][1], points.length > 1 ? `began at ${metric(points[0][1])}` : undefined);
  return (
    <div className="tiles">
      {now("Reward now", rewards)}
      {rewards.length === 0 && now("Loss now", losses)}
      {now("Validation now", validated)}
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
      <div className="scroll-x" tabIndex={0}>
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
