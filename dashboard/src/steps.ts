// The metrics of a run's steps: read once, and of a run that goes on only the steps that are new.

import type { UseQueryOptions } from "@tanstack/react-query";
import { client, get } from "./api.ts";
import { stepOf } from "./live.ts";
import type { StepRow } from "./types.ts";

export interface Steps {
  steps: StepRow[];
}

async function read(run: string, path: string): Promise<Steps> {
  const before = client.getQueryData<Steps>([path])?.steps ?? [];
  const last = before[before.length - 1]?.step;
  const now = stepOf(run);
  // A run that was resumed does its last steps again.
  if (last === undefined || now === null || now < last) return get<Steps>(path);
  const { steps } = await get<Steps>(`${path}?from=${last}`);
  return { steps: [...before.filter((row) => row.step < last), ...steps] };
}

/** What `useQuery` needs to read them. */
export function stepsOf(run: string): UseQueryOptions<Steps, Error> {
  const path = `/runs/${encodeURIComponent(run)}/steps`;
  return { queryKey: [path], queryFn: () => read(run, path) };
}
