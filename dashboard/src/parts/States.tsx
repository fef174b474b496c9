// What a page shows when it has nothing to show (yet), and why.

import { Button, Loader } from "@mantine/core";
import type { ReactNode } from "react";
import { client, Refused } from "../api.ts";

export function Loading() {
  return <div className="state" role="status"><Loader size="sm" type="dots" /><span className="skip">Loading</span></div>;
}

export function Empty({ title, children }: { title: string; children?: ReactNode }) {
  return <div className="state"><h2>{title}</h2><div className="small">{children}</div></div>;
}

export function Failure({ error }: { error: Error }) {
  const title = error instanceof Refused && error.status === 404 ? "Not here" : "This could not be read";
  return (
    <div className="state" role="alert">
      <h2>{title}</h2>
      <p className="small">{error.message}</p>
      <Button size="xs" variant="default" onClick={() => void client.invalidateQueries()}>Try again</Button>
    </div>
  );
}

/** Runs a query's three states; `children` sees the data. */
export function Loaded<T>({ query, children }: { query: { data?: T; error: Error | null; isPending: boolean }; children: (data: T) => ReactNode }) {
  if (query.data !== undefined) return <>{children(query.data)}</>;
  if (query.error) return <Failure error={query.error} />;
  return <Loading />;
}
