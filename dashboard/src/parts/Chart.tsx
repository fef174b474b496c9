// Lines over steps: drawn as SVG, read off with the pointer, and told in words to those who do not see them.

import { useElementSize } from "@mantine/hooks";
import { type PointerEvent, useState } from "react";
import { metric, withUnit } from "../format.ts";

export interface Series {
  name: string;
  color: string;
  points: [number, number][];
  dashed?: boolean;
  dots?: boolean;
  /** The low and the high end of an interval around it, by step. */
  band?: [number, number, number][];
}

const PAD = { left: 44, right: 12, top: 10, bottom: 22 };
export const COLORS = ["var(--accent)", "var(--hot)", "var(--good)", "var(--cold)", "var(--bad)", "var(--gold)"];

export function Chart({ series, height = 160, title, unit = "", onStep }: { series: Series[]; height?: number; title: string; unit?: string; onStep?: (step: number) => void }) {
  const { ref, width } = useElementSize();
  const [at, setAt] = useState<number | null>(null);
  const shown = series.filter((one) => one.points.length > 0);
  const xs = shown.flatMap((one) => one.points.map((p) => p[0]));
  const ys = shown.flatMap((one) => [...one.points.map((p) => p[1]), ...(one.band ?? []).flatMap(([, low, high]) => [low, high])]);
  const box = frame(xs, ys, Math.max(width, 120), height);

  const point = (event: PointerEvent<SVGSVGElement>) => {
    const left = event.clientX - event.currentTarget.getBoundingClientRect().left;
    const step = nearest(xs, box.toStep(left));
    setAt(step);
  };
  return (
    <div className="chart" ref={ref}>
      <svg height={height} viewBox={`0 0 ${Math.max(width, 120)} ${height}`} role="img" aria-label={words(title, shown)}
        onPointerMove={point} onPointerLeave={() => setAt(null)} onClick={() => at !== null && onStep?.(at)}
        style={{ cursor: onStep && at !== null ? "pointer" : undefined }}>
        {box.yTicks.map((tick) => (
          <g key={tick}>
            <line className="rule" x1={PAD.left} x2={box.width - PAD.right} y1={box.y(tick)} y2={box.y(tick)} />
            <text className="tick" x={PAD.left - 8} y={box.y(tick) + 4} textAnchor="end">{tickText(tick, unit)}</text>
          </g>
        ))}
        {box.xTicks.map((tick) => (
          <text key={tick} className="tick" x={box.x(tick)} y={height - 5} textAnchor="middle">{tick}</text>
        ))}
        <text className="tick" x={PAD.left - 8} y={height - 5} textAnchor="end">step</text>
        {at !== null && <line x1={box.x(at)} x2={box.x(at)} y1={PAD.top} y2={height - PAD.bottom} stroke="var(--muted)" strokeDasharray="3 3" />}
        {shown.map((one) => (
          <g key={one.name}>
            {one.band && one.band.length > 1 && <polygon className="band" fill={one.color} points={outline(one.band).map(([x, y]) => `${box.x(x)},${box.y(y)}`).join(" ")} />}
            {one.band?.map(([x, low, high]) => <line key={x} x1={box.x(x)} x2={box.x(x)} y1={box.y(low)} y2={box.y(high)} stroke={one.color} strokeOpacity="0.35" />)}
            <polyline fill="none" stroke={one.color} strokeWidth="2" strokeLinejoin="round" strokeLinecap="round"
              strokeDasharray={one.dashed ? "5 4" : undefined} points={one.points.map(([x, y]) => `${box.x(x)},${box.y(y)}`).join(" ")} />
            {(one.dots || one.points.length === 1) && one.points.map(([x, y]) => <circle key={x} cx={box.x(x)} cy={box.y(y)} r="2.8" fill={one.color} stroke="var(--surface)" strokeWidth="1" />)}
            {at !== null && one.points.filter(([x]) => x === at).map(([x, y]) => <circle key="at" cx={box.x(x)} cy={box.y(y)} r="4" fill={one.color} />)}
          </g>
        ))}
      </svg>
      {at !== null && <Tip at={at} series={shown} unit={unit} left={box.x(at)} width={box.width} />}
    </div>
  );
}

function outline(band: [number, number, number][]): [number, number][] {
  const upper: [number, number][] = band.map(([x, , high]) => [x, high]);
  return [...upper, ...band.map(([x, low]): [number, number] => [x, low]).reverse()];
}

function Tip({ at, series, unit, left, width }: { at: number; series: Series[]; unit: string; left: number; width: number }) {
  const right = left > width / 2;
  return (
    <div className="chart-tip" style={{ top: 8, ...(right ? { right: width - left + 10 } : { left: left + 10 }) }}>
      <div className="muted">step {at}</div>
      {series.map((one) => {
        const found = one.points.find(([x]) => x === at);
        const between = one.band?.find(([x]) => x === at);
        return found && <div key={one.name}><span className="swatch" style={{ background: one.color }} />{one.name} <b>{withUnit(found[1], unit)}</b>{between && <span className="muted"> ({metric(between[1])} to {metric(between[2])})</span>}</div>;
      })}
    </div>
  );
}

export function Legend({ series }: { series: Series[] }) {
  return <div className="legend">{series.map((one) => <span key={one.name}><span className="swatch" style={{ background: one.color }} />{one.name}</span>)}</div>;
}

export function Spark({ series, width = 132, height = 34 }: { series: Series[]; width?: number; height?: number }) {
  const shown = series.filter((one) => one.points.length > 0);
  if (shown.length === 0) return <span className="muted">–</span>;
  const xs = shown.flatMap((one) => one.points.map((p) => p[0]));
  const ys = shown.flatMap((one) => one.points.map((p) => p[1]));
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(0, ...ys), Math.max(...ys, 0.0001)];
  const x = (v: number) => 3 + ((v - x0) / (x1 - x0 || 1)) * (width - 6);
  const y = (v: number) => height - 3 - ((v - y0) / (y1 - y0 || 1)) * (height - 6);
  return (
    <svg width={width} height={height} role="img" aria-label={words("Reward", shown)}>
      {shown.map((one) => <polyline key={one.name} fill="none" stroke={one.color} strokeWidth="1.8" strokeLinejoin="round" points={one.points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ")} />)}
      {shown.filter((one) => one.dots).map((one) => one.points.map(([a, b]) => <circle key={`${one.name}${a}`} cx={x(a)} cy={y(b)} r="2.4" fill={one.color} />))}
    </svg>
  );
}

function frame(xs: number[], ys: number[], width: number, height: number) {
  const [x0, x1] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
  let [y0, y1] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [0, 1];
  if (y0 >= 0 && y0 < (y1 - y0) * 0.8) y0 = 0;
  if (y1 === y0) [y0, y1] = y1 === 0 ? [0, 1] : [Math.min(0, y1 * 1.2), Math.max(0, y1 * 1.2)];
  const yTicks = ticks(y0, y1, height > 200 ? 5 : 3);
  y0 = Math.min(y0, yTicks[0]);
  y1 = Math.max(y1, yTicks[yTicks.length - 1]);
  const span = x1 - x0 || 1;
  const x = (v: number) => PAD.left + ((v - x0) / span) * (width - PAD.left - PAD.right);
  const y = (v: number) => height - PAD.bottom - ((v - y0) / (y1 - y0)) * (height - PAD.top - PAD.bottom);
  const toStep = (left: number) => x0 + ((left - PAD.left) / (width - PAD.left - PAD.right)) * span;
  const xTicks = ticks(x0, x1, Math.max(2, Math.floor(width / 90))).filter((v) => Number.isInteger(v) && v >= x0 && v <= x1);
  return { x, y, toStep, yTicks, xTicks, width };
}

/** Round numbers from at most `low` to at least about `high`. */
function ticks(low: number, high: number, count: number): number[] {
  const raw = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= raw) ?? raw;
  const found: number[] = [];
  for (let v = Math.floor(low / step) * step; v < high + step * 0.999; v += step) found.push(Math.abs(v) < step / 1e6 ? 0 : Number(v.toPrecision(10)));
  return found;
}

function tickText(value: number, unit: string): string {
  if (value === 0) return "0";
  if (unit === "share") return `${Number((100 * value).toPrecision(3))}%`;
  const size = Math.abs(value);
  if (size >= 10_000) return `${Number((value / 1000).toPrecision(3))}k`;
  return size < 0.001 ? Number(value.toPrecision(2)).toExponential().replace("e-", "e−") : String(Number(value.toPrecision(3)));
}

function nearest(values: number[], wanted: number): number | null {
  let best: number | null = null;
  for (const value of values) if (best === null || Math.abs(value - wanted) < Math.abs(best - wanted)) best = value;
  return best;
}

function words(title: string, series: Series[]): string {
  const parts = series.map((one) => {
    const [first, last] = [one.points[0], one.points[one.points.length - 1]];
    return `${one.name} from ${metric(first[1])} at step ${first[0]} to ${metric(last[1])} at step ${last[0]}`;
  });
  return `${title}: ${parts.join("; ") || "nothing yet"}`;
}
