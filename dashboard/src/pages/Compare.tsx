// Runs side by side: the same curves over each other, and where their settings differ.

import { MultiSelect, Switch } from "@mantine/core";
import { useQueries } from "@tanstack/react-query";
import { useState } from "react";
import { Link, useLocation, useSearchParams } from "wouter";
import { get, useData } from "../api.ts";
import { metric, moment, seconds, short, textOf } from "../format.ts";
import { RewardNumber, Status } from "../parts/Badges.tsx";
import { Chart, COLORS, Legend } from "../parts/Chart.tsx";
import { Empty, Loaded, Loading } from "../parts/States.tsx";
import { stepsOf } from "../steps.ts";
import type { ListedRun, Run, StepRow } from "../types.ts";
import { curve, metricNames, titleOf } from "./Run.tsx";
import { useStatus } from "./Runs.tsx";

interface Compared {
  run: Run;
  rows: StepRow[];
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
  const compared: Compared[] = ids.flatMap((_, index) => {
    const run = heads[index].data;
    const rows = steps[index].data?.steps;
    return run && rows ? [{ run, rows, color: COLORS[index % COLORS.length], name: `${run.algorithm} ${short(run.run_id)}` }] : [];
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
              data={runs.map((run) => ({ value: run.run_id, label: `${run.algorithm} ${short(run.run_id)}` }))}
              onChange={(chosen) => go(`/compare?runs=${chosen.map(encodeURIComponent).join(",")}`)} />
          )}
        </Loaded>
      </div>
      {failed?.error ? <Empty title="One of them could not be read">{failed.error.message}</Empty> : compared.length < ids.length ? <Loading /> : ids.length < 2 ? <div className="card"><Empty title="Choose two runs or more">Their curves and settings are shown beside each other.</Empty></div> : <Sides compared={compared} />}
    </>
  );
}

function Sides({ compared }: { compared: Compared[] }) {
  const names = metricNames(compared.flatMap((one) => one.rows));
  const series = (name: string) => compared.map((one) => ({ name: one.name, color: one.color, points: curve(one.rows, name), dots: name === "val_reward" }));
  return (
    <div className="stack">
      <Heads compared={compared} />
      <div style={{ display: "grid", gridTemplateColumns: "repeat(auto-fit, minmax(min(100%, 380px), 1fr))", gap: 14 }}>
        {["reward", "val_reward"].map((name) => (
          <section key={name} className="card card-pad" aria-label={name}>
            <div className="card-title"><h2>{name === "reward" ? "Mean reward" : "Validation reward"}</h2><Legend series={series(name)} /></div>
            <Chart title={name} series={series(name)} height={240} />
          </section>
        ))}
      </div>
      <SettingsDiff compared={compared} />
      <h2>Metrics</h2>
      <div className="charts">
        {names.map((name) => (
          <section key={name} className="card card-pad" aria-label={titleOf(name)}>
            <div className="card-title"><span className="small muted">{titleOf(name)}</span></div>
            <Chart title={titleOf(name)} series={series(name)} height={118} />
          </section>
        ))}
      </div>
    </div>
  );
}

function Heads({ compared }: { compared: Compared[] }) {
  const statusOf = useStatus();
  const last = (rows: StepRow[], name: string) => curve(rows, name).at(-1)?.[1] ?? null;
  return (
    <div className="card scroll-x">
      <table className="list">
        <thead><tr><th>Run</th><th>Status</th><th className="num">Steps</th><th className="num">Reward</th><th className="num">Validation</th><th className="num">A step took</th><th className="num">Started</th><th className="num">Took</th></tr></thead>
        <tbody>
          {compared.map(({ run, rows, color, name }) => (
            <tr key={run.run_id}>
              <td><span className="swatch" style={{ background: color }} /><Link className="link" href={`/runs/${encodeURIComponent(run.run_id)}`}>{name}</Link></td>
              <td><Status value={statusOf(run)} /></td>
              <td className="num">{metric(rows.at(-1)?.step ?? null)}</td>
              <td className="num"><RewardNumber value={last(rows, "reward")} /></td>
              <td className="num"><RewardNumber value={last(rows, "val_reward")} /></td>
              <td className="num">{seconds(pace(rows))}</td>
              <td className="num small">{moment(run.start_time)}</td>
              <td className="num small">{run.end_time ? seconds(run.end_time - run.start_time) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function pace(rows: StepRow[]): number | null {
  const times = rows.filter((row) => row.step > 0).map((row) => row.time);
  return times.length > 1 ? (times[times.length - 1] - times[0]) / (times.length - 1) : null;
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
        <div className="scroll-x">
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
