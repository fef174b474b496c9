// The server's news: what changed is read again, where it is shown. One stream per page.

import { useEffect, useSyncExternalStore } from "react";
import { client } from "./api.ts";

export interface News {
  runs: Record<string, { status: string; step: number | null; doing: string | null; said: string | null }>;
  rollouts: Record<string, number>;
  workers: number;
}

type Connection = "connecting" | "open" | "lost";
let news: News | null = null;
let connection: Connection = "connecting";
const listeners = new Set<() => void>();

function changed(): void {
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useNews(): News | null {
  return useSyncExternalStore(subscribe, () => news);
}

export function useConnection(): Connection {
  return useSyncExternalStore(subscribe, () => connection);
}

/** The step that a run has reached, as far as it was told. */
export function stepOf(run: string): number | null {
  return news?.runs[run]?.step ?? null;
}

/** Which paths show something that is otherwise now. What a run is doing is in the news themselves. */
function touched(before: News | null, now: News): (path: string) => boolean {
  const paths = new Set<string>();
  for (const [id, run] of Object.entries(now.runs)) {
    const old = before?.runs[id];
    const at = `/runs/${encodeURIComponent(id)}`;
    if (old?.status !== run.status || old.step !== run.step) for (const path of ["/runs", at, `${at}/steps`]) paths.add(path);
    if (old?.status !== run.status || old.said !== run.said) paths.add(`${at}/events`);
  }
  const counts = JSON.stringify(before?.rollouts) !== JSON.stringify(now.rollouts) || before?.workers !== now.workers;
  const counted = (path: string) => ["/workers", "/resources", "/rollouts", "/rollouts/count"].includes(path.split("?")[0]);
  return (path) => paths.has(path) || (counts && counted(path));
}

export function useLive(): void {
  useEffect(() => {
    const source = new EventSource("/dashboard/api/news");
    source.onopen = () => {
      connection = "open";
      changed();
    };
    source.onerror = () => {
      connection = "lost";
      changed();
    };
    source.onmessage = (message) => {
      const now = JSON.parse(message.data as string) as News;
      const isTouched = touched(news, now);
      const first = news === null;
      news = now;
      connection = "open";
      changed();
      if (!first) {
        void client.invalidateQueries({
          predicate: (query) => typeof query.queryKey[0] === "string" && isTouched(query.queryKey[0]),
        });
      }
    };
    return () => source.close();
  }, []);
}
