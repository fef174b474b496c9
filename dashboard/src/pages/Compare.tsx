// Runs side by side: the same curves over each other, and where their settings differ.

import { MultiSelect, Switch } from "@mantine/core";
import { useQueries } from "@tanstack/react-query";
import { useState } from "react";
import { Link, useLocation, useSearchParams } from "wouter";
import { get, useData } from "../api.ts";
import { metric, moment, seconds, short, textOf } from "../format.ts";
import { RewardNumber, StandingBadge } from "../parts/Badges.tsx";
import { Chart, COLORS, Legend } from "../parts/Chart.tsx";
import { curve, MetricGroups, validation } from "../parts/Metrics.tsx";
import { Empty, Loaded, Loading } from "../parts/States.tsx";
import { pace, stepsOf } from "../steps.ts";
import type { ListedRun, Metric, Run, RunHead, StepRow } from "../types.ts";

interface Compared {
  run: Run;
  rows: StepRow[];
  metrics: Record<string, Metric>;
  color: string;
  name: string;
}

export default function Compare() {
  const [params] = useSearchParams();
  const [, go] = useLocation();
  const ids = (params.get("runs") ?? "").split(",").filter(Boolean).map(decodeURIComponent).slice(0, 6);
  const all = useData<{ runs: ListedRun[] }>("/runs");
  const heads = useQueries({ queries: ids.map((id) => ({ queryKey: [`/runs/${encodeURIComponent(id)}`], queryFn: () => get<Run>(`/runs/${encodeURIComponent(id)}`) })) });
  const steps = useQueries({ queries: ids.map((id) => stepsOf(id)) });
  const failed = [...heads, ...steps].find((query) => query.error);
  const chosen = heads.flatMap((head) => (head.data ? [head.data] : []));
  const compared: Compared[] = ids.flatMap((_, index) => {
    const run = heads[index].data;
    const found = steps[index].data;
    return run && found ? [{ run, rows: found.steps, metrics: found.metrics, color: COLORS[index % COLORS.length], name: nameAmong(run, chosen) }] : [];
  });
  return (
    <>
      <div className="head">
        <div className="grow">
          <div className="crumbs"><Link href="/">Runs</Link> / compare</div>
          <h1>Compare runs</h1>
        </div>
        <Loaded query={all}>
          {({ runs }) => (
            <MultiSelect aria-label="Runs to compare" w={420} maxValues={6} value={ids} placeholder={ids.length ? "" : "Choose runs"}
              data={runs.map((run) => ({ value: run.run_id, label: nameAmong(run, runs) }))}
              onChange={(chosen) => go(`/compare?runs=${chosen.map(encodeURIComponent).join(",")}`)} />
          )}
        </Loaded>
      </div>
      {failed?.error ? <Empty title="One of them could not be read">{failed.error.message}</Empty> : compared.length < ids.length ? <Loading /> : ids.length < 2 ? <div className="card"><Empty title="Choose two runs or more">Their curves and settings are shown side by side.</Empty></div> : <Sides compared={compared} />}
    </>
  );
}

/** A run by its folder's name; with its id where two folders have the same name. */
function nameAmong(run: RunHead, all: RunHead[]): string {
  return all.filter((one) => one.name === run.name).length > 1 ? `${run.name} (${short(run.run_id)})` : run.name;
}

function Sides({ compared }: { compared: Compared[] }) {
  const metrics: Record<string, Metric> = Object.assign({}, ...compared.map((one) => one.metrics));
  const rewards = compared.map((one) => ({ name: one.name, color: one.color, points: curve(one.rows, "reward") }));
  const validated = compared.map((one) => validation(one.rows, one.name, one.color));
  const charts = [["Mean reward", rewards], ["Validation reward, with its 95 % interval", validated]] as const;
  return (
    <div className="stack">
      <Heads compared={compared} />
      <div className="halves">
        {charts.filter(([, series]) => series.some((one) => one.points.length > 0)).map(([title, series]) => (
          <section key={title} className="card card-pad" aria-label={title}>
            <div className="card-title wrap"><h2>{title}</h2><Legend series={series} /></div>
            <Chart title={title} series={series} height={240} />
          </section>
        ))}
      </div>
      <SettingsDiff compared={compared} />
      <MetricGroups runs={compared} metrics={metrics} />
    </div>
  );
}

function Heads({ compared }: { compared: Compared[] }) {
  const last = (rows: StepRow[], name: string) => curve(rows, name).at(-1)?.[1] ?? null;
  return (
    <div className="card scroll-x" tabIndex={0}>
      <table className="list">
        <thead><tr><th>Run</th><th>Status</th><th className="num">Steps</th><th className="num">Reward</th><th className="num">Validation</th><th className="num" title="The median of all steps">A step took</th><th className="num">Started</th><th className="num">Took</th></tr></thead>
        <tbody>
          {compared.map(({ run, rows, color, name }) => (
            <tr key={run.run_id}>
              <td><span className="swatch" style={{ background: color }} /><Link className="link" href={`/runs/${encodeURIComponent(run.run_id)}`}>{name}</Link></td>
              <td><StandingBadge value={run.standing} /></td>
              <td className="num">{metric(rows.at(-1)?.step ?? null)}</td>
              <td className="num"><RewardNumber value={last(rows, "reward")} /></td>
              <td className="num"><RewardNumber value={last(rows, "val_reward")} /></td>
              <td className="num">{seconds(pace(rows))}</td>
              <td className="num small">{moment(run.start_time)}</td>
              <td className="num small">{run.end_time ? seconds(run.end_time - run.start_time) : "–"}{run.end_time && rows.length > 0 && rows[0].time < run.start_time && <div className="muted">since resumed</div>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function SettingsDiff({ compared }: { compared: Compared[] }) {
  const [all, setAll] = useState(false);
  const names = [...new Set(compared.flatMap((one) => Object.keys(one.run.settings)))].sort();
  const text = (one: Compared, name: string) => (name in one.run.settings ? JSON.stringify(one.run.settings[name]) : undefined);
  const differs = (name: string) => new Set(compared.map((one) => text(one, name))).size > 1;
  const shown = names.filter((name) => all || differs(name));
  return (
    <section className="card" aria-label="Settings">
      <div className="filters" style={{ justifyContent: "space-between", alignItems: "center" }}>
        <h2>{all ? "All settings" : "Settings that differ"}</h2>
        <Switch size="xs" label="Show all" checked={all} onChange={(e) => setAll(e.currentTarget.checked)} />
      </div>
      {shown.length === 0 ? <div className="card-pad muted small">All settings are the same.</div> : (
        <div className="scroll-x" tabIndex={0}>
          <table className="list">
            <thead><tr><th>Setting</th>{compared.map((one) => <th key={one.run.run_id}><span className="swatch" style={{ background: one.color }} />{one.name}</th>)}</tr></thead>
            <tbody>
              {shown.map((name) => (
                <tr key={name} className={all && differs(name) ? "differs" : undefined}>
                  <td className="mono">{name}</td>
                  {compared.map((one) => <td key={one.run.run_id}><span className="prewrap">{text(one, name) === undefined ? "–" : textOf(one.run.settings[name]) || "null"}</span></td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
