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

// A row is a line of the table: a figure, what is wanted of it, and what it is
// compared with: the first is its peer.
type row struct {
	name   string
	want   string // "<= 5.9", or nothing
	beside []value
}

type value struct {
	label string
	value float64 // NaN-free; 0: not measured in this run
}

// A book is what output folders hold: the newest figure and verdict of each name,
// all of the build that ran last.
type book struct {
	own, peers map[string]figure
	parts      []entry
	logs       []string // of stages, by folder
	last       figure
}

func open(folders []string) (*book, error) {
	b := &book{own: map[string]figure{}, peers: map[string]figure{}}
	newest := map[string]entry{}
	var order []string
	for _, dir := range folders {
		entries, err := read[entry](filepath.Join(dir, "parts.jsonl"))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			key := e.Stage + "/" + e.Part
			if _, ok := newest[key]; !ok {
				order = append(order, key)
			}
			newest[key] = e
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
	if len(order) == 0 {
		return nil, fmt.Errorf("nothing has run in %s", strings.Join(folders, ", "))
	}
	for _, key := range order {
		b.parts = append(b.parts, newest[key])
	}
	b.prepare()
	return b, nil
}

// prepare makes figures of others: the better of two copies is what percentages are
// of, the best engines are what both ways at once are, and the best chunk is prefill's.
func (b *book) prepare() {
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
	for name, f := range b.own {
		if engines, ok := strings.CutPrefix(name, "duplex."); ok && strings.HasSuffix(name, ".t16") && f.Value > b.own["kvio.duplex_gbs"].Value {
			f.Name, f.Note = "kvio.duplex_gbs", strings.TrimSuffix(engines, ".t16")
			b.own["kvio.duplex_gbs"] = f
		}
	}
}

func (b *book) peer(label, name string) value { return value{label, b.peers[name].Value} }

// bytes is the time of so many GB at the measured copy bandwidth, in ms.
func (b *book) bytes(gb float64) value {
	v := value{label: "bytes at the measured copy bandwidth"}
	if rate := b.peers["copy"].Value; rate > 0 {
		v.value = gb / rate * 1000
	}
	return v
}

// Llama-3-8B's shape: GB of weights that a decode step reads, and of KV a token.
const weights, perToken = 15.01, 131072 / 1e9

const cuDNN, flash, flashInfer = "PyTorch SDPA, cuDNN, dense KV", "PyTorch SDPA, flash, dense KV", "FlashInfer, paged KV"

// rows is the one place of targets.
func (b *book) rows() (list []row) {
	add := func(name, want string, beside ...value) {
		list = append(list, row{name, want, slices.DeleteFunc(beside, func(v value) bool { return v.value == 0 })})
	}
	of := func(k string) value { return value{"without batch_invariant", b.own["gpu."+k].Value} }
	for _, c := range []struct{ batch, want string }{{"1", "<= 5.9"}, {"8", "<= 6.3"}, {"64", "<= 9.4"}, {"256", "<= 19.5"}} {
		n := map[string]float64{"1": 1, "8": 8, "64": 64, "256": 256}[c.batch]
		add("gpu.decode_step_ms.b"+c.batch, c.want, b.bytes(weights+n*1024*perToken), b.peer("cuBLASLt's linears alone, CUDA graph", "linears.b"+c.batch), b.peer("HF transformers eager", "hf_eager_decode.b"+c.batch))
	}
	add("gpu.decode_step_ms.b64_top_p", "", b.bytes(weights+64*1024*perToken))
	linears := value{label: "cuBLASLt's linears alone in 2k chunks"}
	if ms := b.peers["linears.b2048"].Value; ms > 0 {
		linears.value = 2048 / ms * 1000
	}
	for _, c := range [][2]string{{"2k", ">= 45000"}, {"8k", ">= 42000"}, {"32k", ">= 29000"}} {
		add("gpu.prefill_tok_s."+c[0], c[1], b.peer("HF transformers eager, SDPA", "hf_eager_prefill."+c[0]), linears)
	}
	for _, c := range [][2]string{{"2k", ">= 370"}, {"8k", ">= 575"}, {"32k", ">= 605"}} {
		add("gpu.attn_prefill_tflops."+c[0], c[1], b.peer(cuDNN, "attn_prefill.cudnn."+c[0]), b.peer(flash, "attn_prefill.flash."+c[0]), b.peer(flashInfer, "attn_prefill.flashinfer."+c[0]))
	}
	for _, c := range [][2]string{{"b64_l4k", ">= 2.85"}, {"b64_l1k", ">= 2.65"}, {"b256_l1k", ">= 2.85"}} {
		add("gpu.attn_decode_gbs."+c[0], c[1], b.peer(cuDNN, "attn_decode.cudnn."+c[0]), b.peer(flash, "attn_decode.flash."+c[0]), b.peer(flashInfer, "attn_decode.flashinfer."+c[0]),
			value{"reads", b.peers["read"].Value / 1000})
	}
	add("gpu.attn_decode_us.b1_l8k", "<= 20", b.peer(cuDNN, "attn_decode.cudnn.b1_l8k"), b.peer(flash, "attn_decode.flash.b1_l8k"), b.peer(flashInfer, "attn_decode.flashinfer.b1_l8k"))
	for _, k := range []string{"norm", "rope", "silu"} {
		add("gpu.small_kernel_pct."+k, ">= 90", value{"measured copy", 100})
	}
	read := value{label: "one read of the fp32 logits"}
	if rate := b.peers["read"].Value; rate > 0 {
		read.value = 64 * 128256 * 4 / rate / 1000
	}
	add("gpu.sampler_us.b64", "<= 30", read, b.peer("FlashInfer", "sampler.flashinfer"), b.peer("PyTorch by sorting", "sampler.sort"))
	add("gpu.host_gap_us.p50", "<= 8", value{"target", 8})
	add("gpu.host_gap_us.p99", "<= 20", value{"target", 20})
	add("gpu.mixed_itl_ratio", "<= 2", value{"decoding alone", 1})
	add("gpu.mixed_prefill_tok_s", ">= 22000", value{"prefill alone, 8k", b.own["gpu.prefill_tok_s.8k"].Value})
	add("gpu.hf_logits_error_ratio", "<= 2", value{"transformers' own bf16", 1})
	add("gpu.fp16_hf_logits_error_ratio", "<= 2", value{"transformers' own fp16", 1})
	add("gpu.endurance_pool_held", ">= 0.95", value{"all blocks", 1})
	for _, t := range []string{"t16", "t1", "t64"} {
		for _, way := range []string{"d2h", "h2d"} {
			want := map[string]string{"d2h": ">= 51", "h2d": ">= 50"}[way]
			if way == "h2d" && t == "t1" {
				want = ">= 49"
			}
			add("kvio."+way+"_gbs."+t, want, b.peer("copy engine, one run", "engine."+way), b.peer("cudaMemcpyBatchAsync", "batch."+way+"."+t), b.peer("one copy call a block", "calls."+way+"."+t))
		}
	}
	add("kvio.duplex_gbs", ">= 90", b.peer("copy engines, one run each way", "engine.duplex"))
	for _, c := range [][2]string{{"hit_ttft_ratio.8k", "<= 0.13"}, {"hit_ttft_ratio.32k", "<= 0.085"}, {"hit_ttft_ms.8k", "<= 26"}, {"hit_ttft_ms.32k", "<= 92"}, {"overlap_pct", ">= 90"}, {"peer_ttft_ratio.8k", "<= 0.05"}, {"peer_ttft_ms.8k", ""},
		{"multiturn_ratio", ">= 2"}, {"multiturn_ttft_ratio", "<= 0.35"}, {"itl_ratio", "<= 1.05"}} {
		f := b.own["hicache."+c[0]]
		add("hicache."+c[0], c[1], value{f.Peer, f.PeerValue})
	}
	for _, c := range [][2]string{{"16_at_8k", "<= 7"}, {"16_at_32k", "<= 8"}, {"128_at_8k", ""}} {
		k := 8.0
		if strings.HasSuffix(c[0], "32k") {
			k = 32
		}
		add("gpu.hit_step_ms."+c[0], c[1], b.bytes(weights+k*1024*perToken))
	}
	for _, k := range []string{"decode_step_ms.b1", "decode_step_ms.b8", "decode_step_ms.b64", "decode_step_ms.b256", "prefill_tok_s.2k", "prefill_tok_s.8k"} {
		add("gpu.invariant_"+k, "", of(k))
	}
	for _, d := range []string{"64", "80", "96", "256"} {
		add("gpu.attn_prefill_tflops.8k_d"+d, "", value{cuDNN + ", head_dim 128", b.peers["attn_prefill.cudnn.8k"].Value})
		add("gpu.attn_decode_gbs.b64_l4k_d"+d, "", value{"reads", b.peers["read"].Value / 1000})
	}
	bf16 := func(k string) value { return value{"bf16, same run", b.own[k].Value} }
	for _, k := range []string{"fp16_decode_step_ms.b1", "fp16_decode_step_ms.b64", "fp16_prefill_tok_s.2k", "fp16_prefill_tok_s.8k", "kv8_decode_step_ms.b64", "kv8_decode_step_ms.b256", "kv8_prefill_tok_s.2k", "w8_decode_step_ms.b1", "w8_decode_step_ms.b8", "w8_decode_step_ms.b64", "w8_prefill_tok_s.2k"} {
		_, plain, _ := strings.Cut(k, "_")
		add("gpu."+k, "", bf16("gpu."+plain))
	}
	for _, k := range []string{"kv8_logits_error", "kv8_top1_agreement", "w8_logits_error", "w8_top1_agreement"} {
		add("gpu."+k, "", value{"bf16 weights and KV", 1})
	}
	return list
}

// verdict is "met" or "missed", or nothing where nothing is wanted.
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

// report prints the table, and with a folder for records adds the figures to it.
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
		if !ok {
			if r.want != "" {
				fmt.Fprintf(say, "%-36s%12s %-10snot measured\n", r.name, "-", r.want)
			}
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

const unrun = "not run"

// verdicts prints how stages ended: a line of each stage, and of each family of a
// sanitizer's.
func (b *book) verdicts(say io.Writer) {
	stages := plan()
	for _, s := range stages {
		var names []string // of what is counted together
		counts, notes := map[string]map[string]int{}, map[string][]string{}
		for _, p := range s.parts {
			name := s.name
			if s.tool != "" {
				family, _, _ := strings.Cut(p.name, "/")
				name += " " + family
			}
			if counts[name] == nil {
				counts[name], names = map[string]int{}, append(names, name)
			}
			e := entry{Verdict: unrun}
			if i := slices.IndexFunc(b.parts, func(e entry) bool { return e.Stage == s.name && e.Part == p.name }); i >= 0 {
				e = b.parts[i]
			}
			if counts[name][e.Verdict]++; e.Verdict != good && e.Verdict != unrun {
				notes[name] = append(notes[name], strings.TrimSpace(p.name+" "+e.Verdict+" "+e.Note))
			}
		}
		if !slices.ContainsFunc(b.parts, func(e entry) bool { return e.Stage == s.name }) {
			fmt.Fprintf(say, "%-36s%12s %s\n", s.name, unrun, s.about)
			continue
		}
		for _, name := range names {
			word, all := "ok", 0
			if s.tool != "" {
				word = "clean"
			}
			for _, n := range counts[name] {
				all += n
			}
			if counts[name][good] < all {
				word = fmt.Sprintf("%d of %d", counts[name][good], all)
				if n := counts[name][unrun]; n > 0 {
					notes[name] = append(notes[name], fmt.Sprintf("%d not run", n))
				}
			}
			fmt.Fprintf(say, "%-36s%12s %s\n", name, word, strings.Join(notes[name], "; "))
		}
	}
}

// record adds the figures to DIR/results and the logs to DIR/raw, as other benchmarks have them.
func (b *book) record(dir string) error {
	model := func(name string) string {
		switch {
		case strings.HasPrefix(name, "kvio."):
			ctas := "4 CTAs"
			if !strings.HasSuffix(name, "t16") && !strings.HasSuffix(name, "t64") {
				ctas = "at most 8 CTAs"
			}
			return "Llama-3-8B shape's KV, 512 MiB in shuffled blocks of all 32 layers, block-first host memory, " + ctas
		case strings.HasPrefix(name, "gpu.endurance_"):
			return "8 layers of 1024, random bf16 weights, batch_invariant, 200 clients"
		case strings.HasPrefix(name, "gpu.hf_"):
			return "10 random models: Llama, Qwen2, Qwen3; GQA 1 to 8"
		}
		return "Llama-3-8B shape, random bf16 weights"
	}
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
		if err := os.MkdirAll(filepath.Join(dir, "results"), 0o755); err != nil {
			return err
		}
		if err := add(filepath.Join(dir, "results", book+".jsonl"), figures.Figure{
			Name: r.name, Value: f.Value, Unit: f.Unit, Peer: r.beside[0].label, PeerValue: r.beside[0].value, Ratio: f.Value / r.beside[0].value,
			Device: f.Device, Model: model(r.name), Command: "scripts/cuda-test " + f.Stage, Commit: f.Commit, Date: f.Date, Runs: f.Runs, Spread: strings.Join(spread, "; "), Raw: raw}); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "raw"), 0o755); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(dir, "raw", filepath.Base(raw)), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
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
