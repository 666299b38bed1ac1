// Command benchreport renders bench/README.md from the result lines in a
// folder: go run ./scripts/benchreport bench/results > bench/README.md
package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

func main() {
	log.SetFlags(0)
	files, err := filepath.Glob(filepath.Join(os.Args[1], "*.jsonl"))
	if err != nil {
		log.Fatal(err)
	}
	newest := map[string]figures.Figure{}
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			log.Fatal(err)
		}
		if err := figures.Newest(newest, f); err != nil {
			log.Fatalf("%s: %v", path, err)
		}
		f.Close()
	}
	names := make([]string, 0, len(newest))
	for n := range newest {
		names = append(names, n)
	}
	sort.Strings(names)
	fmt.Fprint(os.Stdout, head)
	for _, n := range names {
		g := newest[n]
		fmt.Fprintf(os.Stdout, "| `%s` | %.4g %s | %.4g (%s) | %s | %s | %s | %s | %s | [raw](%s) |\n", g.Name, g.Value, g.Unit, g.PeerValue, g.Peer,
			ratio(&g), g.Spread, g.Model, g.Device, g.Date+" "+g.Commit, "../"+g.Raw)
	}
	fmt.Fprint(os.Stdout, "\nCommands:\n\n")
	for _, n := range names {
		fmt.Fprintf(os.Stdout, "- `%s`: %s\n", n, command(newest[n].Command))
	}
}

// script is one of ours in a command, from the root of the tree.
var script = regexp.MustCompile(`\bscripts/([\w-]+)`)

// command is how a figure was measured. Scripts go, and the figure stays until it is
// measured by another.
func command(line string) string {
	for _, m := range script.FindAllStringSubmatch(line, -1) {
		if _, err := os.Stat(m[0]); err != nil {
			return "`" + strings.ReplaceAll(line, "scripts/", "") + "`, at its commit: the script `" + m[1] + "` has gone since"
		}
	}
	return "`" + line + "`"
}

// ratio is ours over the peer. A figure without a unit is one itself, whatever stands
// beside it, but where that is a limit of the same kind.
func ratio(g *figures.Figure) string {
	v := g.Ratio
	if (g.Unit == "" || g.Unit == "x") && !strings.HasPrefix(g.Peer, "limit") {
		v = g.Value
	}
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3g", v)
}

const head = `# Measured

Every figure stands beside its peer's, or its limit, from the same run; the
newest line of a name in ` + "`results/*.jsonl`" + ` counts. Medians of the runs; the
ratio is the median of the pairs' ratios, ours over the peer. This page is made
by ` + "`make bench-report`" + `. llama2.c is karpathy/llama2.c's run.c, built apart with
the flags named.

| figure | ours | peer or limit | ratio | spread | model | device | date, commit | log |
|---|---|---|---|---|---|---|---|---|
`
