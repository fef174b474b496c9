// The server's news: what changed is read again, where it is shown. One stream per page.

import { useEffect, useSyncExternalStore } from "react";
import { client } from "./api.ts";

export interface News {
  runs: Record<string, { status: string; step: number | null; doing: string | null; event: string | null }>;
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

/** Which paths show something that is otherwise now. */
function touched(before: News | null, now: News): (path: string) => boolean {
  const runs = Object.keys(now.runs).filter((id) => JSON.stringify(before?.runs[id]) !== JSON.stringify(now.runs[id]));
  const counts = JSON.stringify(before?.rollouts) !== JSON.stringify(now.rollouts);
  return (path) =>
    (runs.length > 0 && path === "/runs") ||
    runs.some((id) => path.startsWith(`/runs/${encodeURIComponent(id)}`)) ||
    (counts && (path === "/workers" || path === "/resources" || path.startsWith("/rollouts?") || path === "/rollouts")) ||
    (counts && path.startsWith("/rollouts/count"));
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
