import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// Built into the Python package, which serves it. In development (`npm run dev`) data comes from a dashboard that runs:
// `agl dashboard RUN --port 4800`.
export default defineConfig({
  base: "/dashboard/",
  plugins: [react()],
  build: {
    outDir: "../agentlightning/dashboard/static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    // Without hashes in the names, so that a change of one page is a change of one file; the server answers with ETags.
    rollupOptions: { output: { entryFileNames: "assets/[name].js", chunkFileNames: "assets/[name].js", assetFileNames: "assets/[name][extname]" } },
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
    chunkSizeWarningLimit: 900,
  },
  server: { proxy: { "/dashboard/api": "http://127.0.0.1:4800" } },
});
