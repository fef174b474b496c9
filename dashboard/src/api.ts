// Reading from the server. Nothing here changes anything there but logging in and out.

import { QueryClient, useQuery, type UseQueryResult } from "@tanstack/react-query";

const API = "/dashboard/api";

/** An answer that is no success; its message is the server's own words. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export async function get<T>(path: string): Promise<T> {
  let response: Response;
  try {
    response = await fetch(API + path, { headers: { accept: "application/json" } });
  } catch {
    throw new Refused(0, "The dashboard's server does not answer: the run may have ended.");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, body?.detail ?? `The server answered ${response.status}.`);
  return body as T;
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  const response = await fetch(API + path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, answer?.detail ?? `The server answered ${response.status}.`);
  return answer as T;
}

export const client = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 30_000,
      refetchOnWindowFocus: false,
      retry: (count, error) => count < 2 && error instanceof Refused && error.status === 0,
    },
  },
});

/** What is at `path`; kept while the next page of it loads. */
export function useData<T>(path: string | null, options: { keep?: boolean } = {}): UseQueryResult<T, Error> {
  return useQuery<T, Error>({
    queryKey: [path],
    queryFn: () => get<T>(path as string),
    enabled: path !== null,
    placeholderData: options.keep ? (previous) => previous : undefined,
  });
}

/** A path with the parameters that have a value. */
export function withParams(path: string, params: Record<string, string | number | null | undefined>): string {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of String(value).split(",")) given.append(name, one);
  }
  const text = given.toString();
  return text ? `${path}?${text}` : path;
}
