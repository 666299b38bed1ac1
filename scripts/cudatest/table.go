package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// row is a line of the table: a figure, its target, and what it is compared with.
type row struct {
	name   string
	want   string  // the target: "<= 5.9", or ""
	beside []value // the first is its peer
}

type value struct {
	label string
	value float64 // 0: not measured in this run
}

// book has the newest figure and verdict of each name in the output folders.
type book struct {
	own, peers map[string]figure
	parts      []entry
	logs       []string // of stages, by folder
	last       figure
}

func open(folders []string) (*book, error) {
	b := &book{own: map[string]figure{}, peers: map[string]figure{}}
	for _, dir := range folders {
		entries, err := read[entry](filepath.Join(dir, "parts.jsonl"))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if i := b.part(e.Stage, e.Part); i >= 0 {
				b.parts[i] = e
			} else {
				b.parts = append(b.parts, e)
			}
		}
		all, err := read[figure](filepath.Join(dir, "figures.jsonl"))
		if err != nil {
			return nil, err
		}
		for _, f := range all {
			b.last = f
			if f.Kind == "PEER" {
				b.peers[f.Name] = f
			} else {
				b.own[f.Name] = f
			}
		}
		logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
		if err != nil {
			return nil, err
		}
		b.logs = append(b.logs, logs...)
	}
	if len(b.parts) == 0 {
		return nil, fmt.Errorf("nothing has run in %s", strings.Join(folders, ", "))
	}
	b.derive()
	return b, nil
}

// part is the index of a part's verdict, or -1.
func (b *book) part(stage, name string) int {
	return slices.IndexFunc(b.parts, func(e entry) bool { return e.Stage == stage && e.Part == name })
}

// derive makes figures from others: percentages of the better of two copies, the best engines for
// both directions at once, and the best chunk size for prefill.
func (b *book) derive() {
	own, theirs := b.own["copy"].Value, b.peers["copy"].Value
	for _, k := range []string{"copy", "read"} {
		if _, ok := b.peers[k]; !ok && own > 0 {
			b.peers[k] = figure{Value: own}
		}
	}
	for _, k := range []string{"norm", "rope", "silu"} {
		name := "gpu.small_kernel_pct." + k
		if f, ok := b.own[name]; ok && theirs > own && own > 0 {
			f.Value, f.P1, f.P99 = f.Value*own/theirs, f.P1*own/theirs, f.P99*own/theirs
			f.Note = fmt.Sprintf("copy %.0f GB/s", theirs)
			b.own[name] = f
		}
	}
	for _, k := range []string{"8k", "32k"} {
		small, ok := b.own["gpu.prefill_tok_s."+k]
		large := b.own["gpu.prefill_tok_s."+k+"_chunk8192"]
		if ok && large.Value > 0 {
			large.Name, large.Note = small.Name, fmt.Sprintf("chunks of 8192 tokens, as where nothing decodes; of 2048: %.0f", small.Value)
			b.own[small.Name] = large
		}
	}
	if f, ok := b.own["push.digest_cost_pct.64m"]; ok {
		f.Name, f.Note = "push.digest_cost_pct", fmt.Sprintf("at 1m: %.2f; at 1g: %.2f", b.own["push.digest_cost_pct.1m"].Value, b.own["push.digest_cost_pct.1g"].Value)
		b.own[f.Name] = f
	}
	for name, f := range b.own {
		if engines, ok := strings.CutPrefix(name, "duplex."); ok && strings.HasSuffix(name, ".t16") && f.Value > b.own["kvio.duplex_gbs"].Value {
			f.Name, f.Note = "kvio.duplex_gbs", strings.TrimSuffix(engines, ".t16")
			b.own["kvio.duplex_gbs"] = f
		}
	}
}

func (b *book) peer(label, name string) value { return value{label, b.peers[name].Value} }

// bytes is the time for gb at the measured copy bandwidth, in ms.
func (b *book) bytes(gb float64) value {
	v := value{label: "bytes at the measured copy bandwidth"}
	if rate := b.peers["copy"].Value; rate > 0 {
		v.value = gb / rate * 1000
	}
	return v
}

// verdict is "met" or "missed", or "" without a target.
func (r *row) verdict(v float64) string {
	var sign string
	var bound float64
	if n, _ := fmt.Sscan(r.want, &sign, &bound); n < 2 {
		return ""
	}
	if sign == "<=" && v <= bound || sign == ">=" && v >= bound {
		return "met"
	}
	return "missed"
}

// report prints the table and, if record names a folder, records the figures there.
func report(say io.Writer, record string, folders ...string) error {
	b, err := open(folders)
	if err != nil {
		return err
	}
	fmt.Fprintf(say, "\n%-36s%12s %-10s%-8s%s\n", cmp.Or(b.last.Device, "no figures"), "measured", "target", "", "beside it")
	met, wanted := 0, 0
	for _, r := range b.rows() {
		if r.want != "" {
			wanted++
		}
		f, ok := b.own[r.name]
		if !ok && r.want != "" {
			fmt.Fprintf(say, "%-36s%12s %-10snot measured\n", r.name, "-", r.want)
		}
		if !ok {
			continue
		}
		v := r.verdict(f.Value)
		if v == "met" {
			met++
		}
		var beside []string
		for _, p := range r.beside {
			beside = append(beside, fmt.Sprintf("%s %.4g", p.label, p.value))
		}
		if f.Verdict != good {
			beside = append(beside, "ITS STAGE: "+f.Verdict)
		}
		fmt.Fprintf(say, "%-36s%12.3f %-10s%-8s%s\n", r.name, f.Value, r.want, v, strings.Join(beside, "; "))
	}
	fmt.Fprintf(say, "%d of %d targets met\n\n", met, wanted)
	b.verdicts(say)
	if record == "" {
		return nil
	}
	return b.record(record)
}

// tally counts the verdicts on parts that are shown in one line.
type tally struct {
	name             string
	all, good, unrun int
	notes            []string
}

// verdicts prints the outcome of each stage, for a sanitizer of each family.
func (b *book) verdicts(say io.Writer) {
	for _, s := range plan() {
		if !slices.ContainsFunc(b.parts, func(e entry) bool { return e.Stage == s.name }) {
			fmt.Fprintf(say, "%-36s%12s %s\n", s.name, "not run", s.about)
			continue
		}
		clean := "ok"
		if s.tool != "" {
			clean = "clean"
		}
		var list []*tally
		for _, p := range s.parts {
			name := s.name
			if s.tool != "" {
				family, _, _ := strings.Cut(p.name, "/")
				name += " " + family
			}
			if len(list) == 0 || list[len(list)-1].name != name { // a family's parts are adjacent
				list = append(list, &tally{name: name})
			}
			t := list[len(list)-1]
			t.all++
			if i := b.part(s.name, p.name); i < 0 {
				t.unrun++
			} else if e := b.parts[i]; e.Verdict == good {
				t.good++
			} else {
				t.notes = append(t.notes, strings.TrimSpace(p.name+" "+e.Verdict+" "+e.Note))
			}
		}
		for _, t := range list {
			word := clean
			if t.good < t.all {
				word = fmt.Sprintf("%d of %d", t.good, t.all)
			}
			if t.unrun > 0 {
				t.notes = append(t.notes, fmt.Sprintf("%d not run", t.unrun))
			}
			fmt.Fprintf(say, "%-36s%12s %s\n", t.name, word, strings.Join(t.notes, "; "))
		}
	}
}

// record adds the figures to DIR/results and the logs to DIR/raw, like other benchmarks.
func (b *book) record(dir string) error {
	raw := filepath.Join("bench", "raw", b.last.Date+"-cuda-test.log")
	for _, r := range b.rows() {
		f, ok := b.own[r.name]
		if !ok || len(r.beside) == 0 || f.Verdict != good {
			continue
		}
		spread := []string{cmp.Or(f.Spread, fmt.Sprintf("%.4g to %.4g", f.P1, f.P99))}
		if f.Device1 > 0 {
			spread = append(spread, fmt.Sprintf("device alone %.4g", f.Device1))
		}
		if f.Note != "" {
			spread = append(spread, f.Note)
		}
		for _, p := range r.beside[1:] {
			spread = append(spread, fmt.Sprintf("%s: %.4g", p.label, p.value))
		}
		book, _, _ := strings.Cut(r.name, ".")
		if err := add(filepath.Join(dir, "results", book+".jsonl"), figures.Figure{
			Name: r.name, Value: f.Value, Unit: f.Unit, Peer: r.beside[0].label, PeerValue: r.beside[0].value, Ratio: f.Value / r.beside[0].value,
			Device: f.Device, Model: modelOf(r.name), Command: "scripts/cuda-test " + f.Stage, Commit: f.Commit, Date: f.Date, Runs: f.Runs, Spread: strings.Join(spread, "; "), Raw: raw}); err != nil {
			return err
		}
	}
	log, err := figures.Append(filepath.Join(dir, "raw", filepath.Base(raw)))
	if err != nil {
		return err
	}
	fmt.Fprintf(log, "# scripts/cuda-test, commit %s on %s\n", b.last.Commit, b.last.Device)
	for _, path := range b.logs {
		text, err := os.ReadFile(path)
		if err != nil {
			return errors.Join(err, log.Close())
		}
		fmt.Fprintf(log, "\n## %s\n%s", strings.TrimSuffix(filepath.Base(path), ".log"), text)
	}
	line, err := json.Marshal(b.parts)
	fmt.Fprintf(log, "\n# %s\n", line)
	return errors.Join(err, log.Close())
}
