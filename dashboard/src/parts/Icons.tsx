// A few line icons; decoration only, so hidden from readers of the page.

const PATHS: Record<string, string> = {
  runs: "M3 17l5-6 4 4 8-10M3 21h18",
  rollouts: "M4 6h16M4 12h16M4 18h10",
  resources: "M12 3l8 4-8 4-8-4zM4 12l8 4 8-4M4 17l8 4 8-4",
  workers: "M5 4h14v6H5zM5 14h14v6H5zM8 7h.01M8 17h.01",
  sun: "M12 8a4 4 0 100 8 4 4 0 000-8zM12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 019.5 4 8.5 8.5 0 1020 14.5z",
  pin: "M9 4h6l-1 6 3 3v2H7v-2l3-3zM12 15v6",
  search: "M11 4a7 7 0 100 14 7 7 0 000-14zM20 20l-4-4",
};

export function Icon({ name, size = 17 }: { name: keyof typeof PATHS | string; size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 24 24" fill="none" stroke="currentColor" strokeWidth="1.8" aria-hidden>
      <path d={PATHS[name]} strokeLinecap="round" strokeLinejoin="round" />
    </svg>
  );
}

export function Bolt() {
  return (
    <svg width="24" height="24" viewBox="0 0 32 32" aria-hidden>
      <rect width="32" height="32" rx="8" fill="#4c3fd1" />
      <path d="M18 5 8 18h6l-1 9 11-14h-7z" fill="#ffd34d" />
    </svg>
  );
}
