// Two texts line by line: what was added, what went, what stayed.

import { textOf } from "../format.ts";

type Line = { kind: "same" | "add" | "del"; text: string };
const MOST = 4_000_000;

export function Diff({ before, after }: { before: string | null; after: string }) {
  const lines: Line[] = before === null ? after.split("\n").map((text) => ({ kind: "same", text })) : compare(before.split("\n"), after.split("\n"));
  return <div className="diff">{lines.map((line, index) => <div key={index} className={line.kind}>{textOf(line.text) || " "}</div>)}</div>;
}

/** By the longest common subsequence; texts too long for it are shown one after the other. */
export function compare(a: string[], b: string[]): Line[] {
  if (a.length * b.length > MOST) return [...a.map((text): Line => ({ kind: "del", text })), ...b.map((text): Line => ({ kind: "add", text }))];
  const length = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) length[i][j] = a[i] === b[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
  const lines: Line[] = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { lines.push({ kind: "same", text: a[i] }); i++; j++; }
    else if (i < a.length && (j === b.length || length[i + 1][j] >= length[i][j + 1])) lines.push({ kind: "del", text: a[i++] });
    else lines.push({ kind: "add", text: b[j++] });
  }
  return lines;
}
