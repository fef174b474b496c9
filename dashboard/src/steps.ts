// The metrics of a run's steps: read once, and of a run that goes on only the steps that are new.

import type { UseQueryOptions } from "@tanstack/react-query";
import { client, get } from "./api.ts";
import { stepOf } from "./live.ts";
import type { Metric, StepRow } from "./types.ts";

export interface Steps {
  steps: StepRow[];
  metrics: Record<string, Metric>;
}

async function read(run: string, path: string): Promise<Steps> {
  const known = client.getQueryData<Steps>([path]);
  const before = known?.steps ?? [];
  const last = before[before.length - 1]?.step;
  const now = stepOf(run);
  // A run that was resumed does its last steps again.
  if (last === undefined || now === null || now < last) return get<Steps>(path);
  const { steps, metrics } = await get<Steps>(`${path}?from=${last}`);
  return { steps: [...before.filter((row) => row.step < last), ...steps], metrics: { ...known?.metrics, ...metrics } };
}

/** What `useQuery` needs to read them. */
export function stepsOf(run: string): UseQueryOptions<Steps, Error> {
  const path = `/runs/${encodeURIComponent(run)}/steps`;
  return { queryKey: [path], queryFn: () => read(run, path) };
}

/** Seconds that a step took: the median of those from one step's end to the next, which a pause before a resume leaves as it is. */
export function pace(rows: StepRow[]): number | null {
  const times = rows.filter((row) => row.step > 0).map((row) => row.time);
  const gaps = times.slice(1).map((time, index) => time - times[index]).sort((a, b) => a - b);
  return gaps.length === 0 ? null : (gaps[Math.floor((gaps.length - 1) / 2)] + gaps[Math.floor(gaps.length / 2)]) / 2;
}
