// The metrics of one run, or of several over each other, in the groups of the table in `agentlightning/metrics/catalogue.py`.

import { ActionIcon, TextInput, Tooltip } from "@mantine/core";
import { useLocalStorage } from "@mantine/hooks";
import { type ReactNode, useState } from "react";
import { withUnit } from "../format.ts";
import type { Metric, StepRow } from "../types.ts";
import { Chart, type Series } from "./Chart.tsx";
import { Icon } from "./Icons.tsx";

export interface Measured {
  name: string;
  color: string;
  rows: StepRow[];
}

type Point = [number, number];
const FOLDED = "Internals";
const PINNED = "Pinned";
const AT_THE_TOP = new Set(["reward", "val_reward"]);

export function curve(rows: StepRow[], name: string): Point[] {
  return rows.filter((row) => typeof row[name] === "number").map((row) => [row.step, row[name] as number]);
}

/** The validation reward with its interval, as a series of a chart. */
export function validation(rows: StepRow[], name: string, color: string): Series {
  const band = rows.filter((row) => typeof row.val_low === "number" && typeof row.val_high === "number");
  return { name, color, points: curve(rows, "val_reward"), dots: true, band: band.map((row) => [row.step, row.val_low as number, row.val_high as number]) };
}

/** What is drawn: of a total since the run began what each step added; a process that began anew counts from 0. */
function drawn(rows: StepRow[], metric: Metric): Point[] {
  const points = curve(rows, metric.name);
  if (metric.kind !== "counter" || points.length < 2) return points;
  return points.slice(1).map(([step, value], index): Point => [step, value >= points[index][1] ? value - points[index][1] : value]);
}

interface Drawn {
  metric: Metric;
  series: Series[];
  /** Whether there is a line to draw: something that changes. */
  isLine: boolean;
}

function prepared(runs: Measured[], metric: Metric): Drawn {
  const series = runs.map((run) => ({ name: run.name, color: run.color, points: drawn(run.rows, metric) }));
  const isLine = metric.kind !== "figure" && series.some((one) => new Set(one.points.map((point) => point[1])).size > 1);
  return { metric, series: series.filter((one) => one.points.length > 0), isLine };
}

/** On a phone the first groups are open, and the others are opened by who wants them. */
function isOpen(group: string): boolean {
  return window.innerWidth > 620 ? group !== FOLDED : [PINNED, "Reward and validation", "Is it stable"].includes(group);
}

export function MetricGroups({ runs, metrics, onStep }: { runs: Measured[]; metrics: Record<string, Metric>; onStep?: (step: number) => void }) {
  const [wanted, setWanted] = useState("");
  const [pins, setPins] = useLocalStorage<string[]>({ key: "agl-pinned-metrics", defaultValue: [] });
  const words = wanted.trim().toLowerCase();
  const isWanted = (metric: Metric) => [metric.name, metric.title, metric.group].some((text) => text.toLowerCase().includes(words));
  const shown = Object.values(metrics).filter((metric) => metric.kind !== "hidden" && !AT_THE_TOP.has(metric.name) && isWanted(metric)).map((metric) => prepared(runs, metric)).filter((one) => one.series.length > 0);
  const groups = new Map<string, Drawn[]>([[PINNED, []]]);
  for (const one of shown) {
    const group = pins.includes(one.metric.name) ? PINNED : one.metric.group;
    groups.set(group, [...(groups.get(group) ?? []), one]);
  }
  const toggle = (name: string) => setPins((now) => (now.includes(name) ? now.filter((one) => one !== name) : [...now, name]));
  return (
    <div className="stack">
      <div className="row wrap" style={{ justifyContent: "space-between" }}>
        <h2>Metrics</h2>
        <TextInput size="xs" placeholder="Find a metric" aria-label="Find a metric" leftSection={<Icon name="search" size={14} />} value={wanted} onChange={(e) => setWanted(e.currentTarget.value)} />
      </div>
      {shown.length === 0 && <p className="muted">No metric has this name.</p>}
      {[...groups].filter(([, found]) => found.length > 0).map(([group, found]) => (
        <details key={group} className="group" open={isOpen(group) || words !== ""}>
          <summary><h3>{group}</h3><span className="small muted">{found.length}</span></summary>
          <Group found={found} several={runs.length > 1} pins={pins} toggle={toggle} onStep={onStep} />
        </details>
      ))}
    </div>
  );
}

function Group({ found, several, pins, toggle, onStep }: { found: Drawn[]; several: boolean; pins: string[]; toggle: (name: string) => void; onStep?: (step: number) => void }) {
  const [lines, figures] = [found.filter((one) => one.isLine), found.filter((one) => !one.isLine)];
  const pin = (metric: Metric) => <Pin on={pins.includes(metric.name)} title={metric.title} toggle={() => toggle(metric.name)} />;
  return (
    <>
      {lines.length > 0 && <div className="charts">{lines.map((one) => <Card key={one.metric.name} drawn={one} several={several} pin={pin(one.metric)} onStep={onStep} />)}</div>}
      {figures.length > 0 && (
        <dl className="card measured figures">
          {figures.map(({ metric, series }) => (
            <div key={metric.name}>
              <dt><Title metric={metric} /></dt>
              <dd>{[...new Set(series.map((one) => withUnit(one.points[one.points.length - 1][1], metric.unit)))].join(" · ")} {pin(metric)}</dd>
            </div>
          ))}
        </dl>
      )}
    </>
  );
}

function Card({ drawn, several, pin, onStep }: { drawn: Drawn; several: boolean; pin: ReactNode; onStep?: (step: number) => void }) {
  const { metric, series } = drawn;
  const last = series[0]?.points[series[0].points.length - 1];
  const named = several ? series : series.map((one) => ({ ...one, name: metric.title }));
  return (
    <section className="card card-pad" aria-label={metric.title}>
      <div className="card-title">
        <Title metric={metric} />
        <span className="row" style={{ gap: 4 }}>{!several && last && <b className="small keep">{withUnit(last[1], metric.unit)}</b>}{pin}</span>
      </div>
      <Chart title={metric.title} unit={metric.unit} series={named} height={118} onStep={onStep} />
    </section>
  );
}

/** What a metric is called; what it means is shown on hover and on focus. */
export function Title({ metric }: { metric: Metric }) {
  const sentence = metric.kind === "counter" ? `${metric.sentence} Shown: what each step added.` : metric.sentence;
  const title = metric.kind === "counter" ? `${metric.title} per step` : metric.title;
  return (
    <Tooltip label={`${sentence} (${metric.name})`} multiline w={280} events={{ hover: true, focus: true, touch: true }}>
      <button type="button" className="act small muted titled" aria-label={`${title}: ${sentence}`}>{title}</button>
    </Tooltip>
  );
}

function Pin({ on, title, toggle }: { on: boolean; title: string; toggle: () => void }) {
  return (
    <ActionIcon variant="subtle" color={on ? "violet" : "gray"} size="xs" className={on ? "pin on" : "pin"} aria-pressed={on} aria-label={`Pin ${title}`} title={on ? "Unpin" : "Pin to the top"} onClick={toggle}>
      <Icon name="pin" size={13} />
    </ActionIcon>
  );
}
