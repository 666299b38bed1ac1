package main

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// topic is a table of bench/README.md. A figure belongs to the first topic with a prefix of
// its name.
type topic struct {
	title, about string
	names        []string
}

var topics = []topic{
	{"Builds", "This build beside an earlier one, in alternating rounds. The figure is the worse end of the median's 95 % interval.", []string{"edge.cpu_ratio.", "house."}},
	{"Router", "Processor time, latency and memory that the router adds, in front of mock engines.", []string{"router."}},
	{"Soak, faults, tests", "Wrong answers and errors under kills, stops, lost networks and full disks; how many drawn bugs the tests notice.", []string{"edge.", "kv.partition"}},
	{"Streams that lose their decode worker", "The pause that clients see until another pair goes on, and what the router pays for that while nothing goes wrong; requests that an upgrade fails.", []string{"stream."}},
	{"CPU", "Decode beside llama2.c's run; what prefill and decode in two processes cost a small model.", []string{"cpu.", "e2e."}},
	{"Speculation", "Tokens with drafts that steps verify (`docs/speculation.md`) beside without, for summaries of given text, code edits and free stories, one, 4 and 16 answers at a time; drafts accepted where prefill is apart.", []string{"spec."}},
	{"KV transfer between processes", "`xpyd bench kv` beside memcpy, a bare socket loop, NIXL, Mooncake and iperf3.", []string{"kv."}},
	{"Twin", "Fleets that exist only on a virtual clock (`xpyd plan`) beside real ones, under the same loads; real routers and workers on a device that only waits (`brain.process`) beside theirs; fleets that mix (`brain`) beside those that do not.", []string{"twin.", "brain."}},
	{"Planner", "The planner in the twin (`docs/scaling.md`), over two days, beside the best fleet that stays as it is and one whose planner knows what comes.", []string{"plan."}},
	{"Tiers and peers", "KV in host memory, on an SSD and in other workers' pools.", []string{"hicache.", "kvio.", "mooncake.", "peers."}},
	{"Between GPUs", "Pushes over NVLink, what a remote prefill costs, and goodput of prefill and decode apart ([GOODPUT.md](GOODPUT.md)).", []string{"push."}},
	{"GPU: single kernels", "Attention, sampling and small kernels beside PyTorch's, cuDNN's, and the memory's bandwidth.", []string{"gpu.attn_", "gpu.kv8_attn", "gpu.small_", "gpu.sampler_", "gpu.projections", "gpu.w8_projections"}},
	{"GPU: whole steps", "Decode and prefill steps of Llama-3-8B's shape, and how far logits are from transformers'.", []string{"gpu."}},
	{"GPU: inside one", "Prefill beside 64 streams inside one GPU: each on multiprocessors of its own (green contexts), and in steps that mix them.", []string{"inside."}},
	{"GPU: latent attention", "Decode attention over paged latents (`probe bench latent`). No step uses it yet.", []string{"mla."}},
	{"Speculation", "SmolLM2 on the CPU with drafts by prompt lookup, beside without; how many drafts of a run are right where prefill is apart.", []string{"spec."}},
	{"GPU: mixtures of experts", "Decode and prefill steps of Qwen3-30B-A3B's shape, beside the bytes of the experts that a step is likely to meet.", []string{"moe."}},
	{"GPU: ranks", "Tensor parallelism: steps of a model on several GPUs (`tp.apart`; `tp.nccl` with sums through NCCL, as where they do not reach each other), or by several ranks on one, beside one rank's; their all-reduce alone beside NCCL's, and beside an empty kernel and a copy of the bytes; KV pushed between unequal numbers of ranks beside the copy engine; logits beside transformers'.", []string{"tp."}},
	{"Beside vLLM", "One whole worker behind the router and `vllm serve` on the same GPU, both at their defaults, under closed loops: ours over vLLM's. TTFT is the median or the 99th percentile, TPOT the mean, output counts while all clients are at work. Goodput is the highest rate of random arrivals at which 90 % of the requests get what is promised of them.", []string{"vs_vllm."}},
	{"Load generator", "`xpyd bench` beside aiperf, and what it can drive.", []string{"loadgen."}},
	{"Grammars", "Constrained output (`internal/grammar`) beside llguidance, on the schemas of JSONSchemaBench: how many compile, how long that takes, and a mask of the tokens that may come next.", []string{"grammar."}},
	{"Front door", "Requests made up from the router's own `/openapi.json` (schemathesis), and what was answered outside it; how many of vLLM's own tests of its server pass against `xpyd up`, of those that ran and apply; what models write (`internal/answer`) in the texts of SMG's parsers' tests, whole and in pieces, beside what those want. The logs name what is otherwise, and why.", []string{"door."}},
	{"Releases and the dashboard", "What a stranger waits for who has nothing but the release's archive; what the dashboard's page weighs, and how smooth it is in Chromium.", []string{"ship.", "dash."}},
	{"Other", "", []string{""}},
}

// retired is a line of bench/retired.jsonl: a figure that no longer counts.
type retired struct {
	figures.Figure
	Reason string `json:"reason"`
}

// newest reads the newest figure of each name under ROOT/bench/results.
func newest(root string) (map[string]figures.Figure, error) {
	paths, err := filepath.Glob(filepath.Join(root, "bench/results/*.jsonl"))
	if err != nil {
		return nil, err
	}
	all := map[string]figures.Figure{}
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		err = figures.Newest(all, f)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	return all, nil
}

// writeReport prints bench/README.md. It fails if a figure names a command or a commit that is not there.
func writeReport(root string, to io.Writer) error {
	all, err := newest(root)
	if err != nil {
		return err
	}
	if err := check(root, slices.Collect(maps.Values(all))); err != nil {
		return err
	}
	old, err := os.ReadFile(filepath.Join(root, "bench/retired.jsonl"))
	if err != nil {
		return err
	}
	fmt.Fprint(to, head)
	for i, t := range topics {
		var rows []figures.Figure
		for _, name := range slices.Sorted(maps.Keys(all)) {
			if topicOf(name) == i {
				rows = append(rows, all[name])
			}
		}
		if len(rows) > 0 {
			fmt.Fprintf(to, "\n## %s\n\n%s ", t.title, t.about)
			table(to, rows)
		}
	}
	return retirees(to, old)
}

func topicOf(name string) int {
	return slices.IndexFunc(topics, func(t topic) bool {
		return slices.ContainsFunc(t.names, func(begin string) bool { return strings.HasPrefix(name, begin) })
	})
}

// table writes a topic's figures and how to repeat each.
func table(to io.Writer, rows []figures.Figure) {
	devices := map[string]bool{}
	for i := range rows {
		devices[rows[i].Device] = true
	}
	on, rule := " on |", "---|"
	if len(devices) == 1 {
		fmt.Fprintf(to, "On: %s.\n", rows[0].Device)
		on, rule = "", ""
	}
	fmt.Fprintf(to, "\n| figure | ours | beside it | ratio | spread |%s log |\n|---|---|---|---|---|%s---|\n", on, rule)
	by := map[string]map[string][]string{} // names by command and load
	for i := range rows {
		f := &rows[i]
		device := ""
		if len(devices) > 1 {
			device = strings.ReplaceAll(f.Device, "NVIDIA ", "") + " | "
		}
		gone := ""
		if f.Was != "" {
			gone = " †"
		}
		fmt.Fprintf(to, "| `%s`%s | %.4g %s | %.4g, %s | %s | %s | %s[%s](../%s) |\n", f.Name, gone, f.Value, f.Unit, f.PeerValue, f.Peer, ratio(f), spread(f), device, f.Date, f.Raw)
		command := "`" + f.Command + "`"
		if f.Was != "" {
			command += " (†: measured by " + f.Was + ")"
		}
		if by[command] == nil {
			by[command] = map[string][]string{}
		}
		by[command][f.Model] = append(by[command][f.Model], "`"+f.Name+"`")
	}
	fmt.Fprintln(to)
	for _, command := range slices.Sorted(maps.Keys(by)) {
		fmt.Fprintf(to, "- %s\n", command)
		for _, load := range slices.Sorted(maps.Keys(by[command])) {
			names := by[command][load]
			if len(names) > 3 {
				names = []string{names[0], "to", names[len(names)-1]}
			}
			fmt.Fprintf(to, "  - %s: %s\n", strings.Join(names, " "), load)
		}
	}
}

var ofRatio = regexp.MustCompile(`ratio (\S+\.\.[0-9.]+)`)

// spread is the ratio's, or else the figure's up to the first semicolon.
func spread(f *figures.Figure) string {
	if m := ofRatio.FindStringSubmatch(f.Spread); m != nil {
		return m[1]
	}
	begin, _, _ := strings.Cut(f.Spread, ";")
	return begin
}

// ratio is ours over the peer. A figure without a unit is a ratio itself, unless its peer is
// a limit.
func ratio(f *figures.Figure) string {
	v := f.Ratio
	if (f.Unit == "" || f.Unit == "x") && !strings.HasPrefix(f.Peer, "limit") {
		v = f.Value
	}
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3g", v)
}

// retirees lists the figures that no longer count, by reason.
func retirees(to io.Writer, lines []byte) error {
	by := map[string][]string{}
	for line := range strings.Lines(string(lines)) {
		var r retired
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			return fmt.Errorf("bench/retired.jsonl: %w", err)
		}
		by[r.Reason] = append(by[r.Reason], "`"+r.Name+"`")
	}
	fmt.Fprint(to, "\n## Retired\n\nThese were measured once and do not count; their lines are in [retired.jsonl](retired.jsonl).\n\n")
	for _, reason := range slices.Sorted(maps.Keys(by)) {
		fmt.Fprintf(to, "- %s: %s\n", reason, strings.Join(by[reason], ", "))
	}
	return nil
}

// head begins the page.
//
//go:embed head.md
var head string
