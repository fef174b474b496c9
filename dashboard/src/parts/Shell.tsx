// The frame of every page: where one is, where one can go, and whether what one sees is live.

import { ActionIcon, Button, useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import type { ReactNode } from "react";
import { Link, useLocation } from "wouter";
import { client, post } from "../api.ts";
import { useConnection, useNews } from "../live.ts";
import type { Session } from "../types.ts";
import { Bolt, Icon } from "./Icons.tsx";

const PAGES = [
  { path: "/", icon: "runs", name: "Runs", mine: (at: string) => at === "/" || at.startsWith("/runs") || at === "/compare" },
  { path: "/rollouts", icon: "rollouts", name: "Rollouts", mine: (at: string) => at.startsWith("/rollouts") },
  { path: "/resources", icon: "resources", name: "Resources", mine: (at: string) => at === "/resources" },
  { path: "/workers", icon: "workers", name: "Workers", mine: (at: string) => at === "/workers" },
];

export function Shell({ session, children }: { session: Session; children: ReactNode }) {
  const [at] = useLocation();
  return (
    <div className="shell">
      <a className="skip" href="#main">Skip to content</a>
      <aside className="side">
        <Link href="/" className="brand" aria-label="Agent Lightning"><Bolt /> <span>Agent Lightning</span></Link>
        <nav aria-label="Pages">
          {PAGES.map((page) => (
            <Link key={page.path} href={page.path} className="nav" aria-current={page.mine(at) ? "page" : undefined}>
              <Icon name={page.icon} /> <span>{page.name}</span>
            </Link>
          ))}
        </nav>
        <div className="side-foot">
          <LiveMark session={session} />
          <div className="row">
            <SchemeSwitch />
            <span className="version" title="Version of the package">v{session.version}</span>
          </div>
          {session.can_log_out && <Button size="compact-xs" variant="default" onClick={logOut}>Log out</Button>}
        </div>
      </aside>
      <main className="main" id="main">{children}</main>
    </div>
  );
}

async function logOut(): Promise<void> {
  await post("/logout", {});
  await client.invalidateQueries();
}

function LiveMark({ session }: { session: Session }) {
  const connection = useConnection();
  const news = useNews();
  const going = Object.values(news?.runs ?? {}).some((run) => run.status === "running") && session.live;
  if (connection === "lost") return <span className="badge bad" role="status"><span className="dot" /> <span>Not connected</span></span>;
  if (!going) return <span className="badge" role="status"><span className="dot" /> <span>No run under way</span></span>;
  return <span className="badge good" role="status"><span className="dot pulse" /> <span>Live</span></span>;
}

function SchemeSwitch() {
  const { setColorScheme } = useMantineColorScheme();
  const scheme = useComputedColorScheme("light");
  const other = scheme === "dark" ? "light" : "dark";
  return (
    <ActionIcon variant="default" size="md" aria-label={`Switch to ${other} colours`} onClick={() => setColorScheme(other)}>
      <Icon name={scheme === "dark" ? "sun" : "moon"} size={15} />
    </ActionIcon>
  );
}
