// Numbers, times and texts as people read them.

const grouped = new Intl.NumberFormat("en");

export function amount(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : grouped.format(value);
}

/** A metric: as many digits as tell something. */
export function metric(value: unknown): string {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  if (Number.isInteger(value)) return grouped.format(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : 3);
}

export function reward(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(3).replace(/0+$/, "");
}

export function signed(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function clock(time: number | null | undefined): string {
  return time ? new Date(time * 1000).toLocaleTimeString("en-GB") : "–";
}

export function moment(time: number | null | undefined): string {
  if (!time) return "–";
  return new Date(time * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

export function ago(time: number | null | undefined, now = Date.now() / 1000): string {
  if (!time) return "–";
  const passed = Math.max(0, now - time);
  if (passed < 5) return "just now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129_600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86_400)} days ago`;
}

/** The short end of an id, which is where ids differ. */
export function short(id: string): string {
  return id.length > 14 ? `…${id.slice(-8)}` : id;
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Text of somebody else with what would be invisible, or would move other text, made visible. */
export function visible(text: string): string {
  return text.replace(/\r\n/g, "\n").replace(CONTROL, (found) => {
    const code = found.codePointAt(0) ?? 0;
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A value as text: what is text as it is, everything else as JSON. */
export function textOf(value: unknown): string {
  if (value === null || value === undefined) return "";
  return visible(typeof value === "string" ? value : JSON.stringify(value, null, 2));
}

/** A metric with its unit. */
export function withUnit(value: unknown, unit: string): string {
  if (typeof value !== "number" || !unit) return metric(value);
  if (unit === "share") return `${Number((100 * value).toPrecision(3))} %`;
  if (unit === "s") return seconds(value);
  return `${metric(value)} ${value === 1 ? unit.replace(/s$/, "") : unit}`;
}
