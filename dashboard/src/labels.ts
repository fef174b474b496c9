// Labels that a person gives rollouts here, for `agl judge RUN --labels FILE`. They stay in this browser: the dashboard
// changes nothing in a store. A file of them is downloaded, a line for each rollout.

import { useState } from "react";

export type Labels = Record<string, number>;

const place = (run: string) => `agl-labels:${run}`;

function kept(run: string): Labels {
  try {
    return JSON.parse(localStorage.getItem(place(run)) ?? "{}") as Labels;
  } catch {
    return {}; // a browser that keeps nothing, or something else of this name
  }
}

/** The labels of a run by rollout, and how to change one; null takes it away. */
export function useLabels(run: string): [Labels, (rollout: string, label: number | null) => void] {
  const [labels, setLabels] = useState(() => kept(run));
  const change = (rollout: string, label: number | null) => {
    const next = { ...kept(run) }; // another page may have changed others
    if (label === null) delete next[rollout];
    else next[rollout] = label;
    try {
      localStorage.setItem(place(run), JSON.stringify(next));
    } catch {
      // they are there for as long as this page is
    }
    setLabels(next);
  };
  return [labels, change];
}

/** The address of a file with the labels, as `agl judge` reads it. */
export function asFile(labels: Labels): string {
  const lines = Object.entries(labels).map(([rollout_id, label]) => `${JSON.stringify({ rollout_id, label })}\n`);
  return `data:application/x-ndjson;charset=utf-8,${encodeURIComponent(lines.join(""))}`;
}
