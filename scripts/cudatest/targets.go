package main

import (
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
)

// Llama-3-8B's shape: GB of weights read by a decode step, and of KV per token.
const weights, perToken = 15.01, 131072 / 1e9

// Of Qwen3-30B-A3B's shape: layers; GB in bf16 of a layer's attention and router, of an expert, of the head, and of a
// position's KV; billions of weights that a token meets, without the head.
const mixtureLayers, mixtureLayer, mixtureExpert, mixtureHead, mixtureToken = 48, 0.03828, 0.009437, 0.6223, 98304 / 1e9
const mixtureActive = mixtureLayers * (mixtureLayer + 8*mixtureExpert) / 2

// mixtureBytes are the GB that a decode step of n sequences with 1,024 positions touches, and how many of 128 experts it
// is likely to meet if each token chooses 8 of them at random, as random weights do. bytes are those of a layer's weight.
func mixtureBytes(n int, bytes float64) (gb, experts float64) {
	experts = 128 * (1 - math.Pow(1-8.0/128, float64(n)))
	return mixtureLayers*(mixtureLayer+experts*mixtureExpert)*bytes/2 + mixtureHead + float64(n)*1024*mixtureToken, experts
}

const cuDNN, flash, flashInfer = "PyTorch SDPA, cuDNN, dense KV", "PyTorch SDPA, flash, dense KV", "FlashInfer, paged KV"

// rows has all targets.
func (b *book) rows() (list []row) {
	add := func(name, want string, beside ...value) {
		list = append(list, row{name, want, slices.DeleteFunc(beside, func(v value) bool { return v.value == 0 })})
	}
	for _, form := range []struct {
		name  string
		bytes float64 // of a weight, of a layer's
	}{{"w8_", 1}, {"", 2}} {
		for _, n := range []int{1, 16, 64, 256} {
			name := fmt.Sprintf("moe.%sdecode_step_ms.b%d", form.name, n)
			gb, distinct := mixtureBytes(n, form.bytes)
			limit := b.bytes(gb)
			limit.label += fmt.Sprintf(", %.0f of 128 experts", distinct)
			add(name, "", limit)
			if own, ok := b.own[name]; ok && limit.value > 0 && form.bytes == 1 {
				own.Name, own.Unit, own.Value, own.P1, own.P99 = fmt.Sprint("moe.decode_ratio.b", n), "ratio", own.Value/limit.value, own.P1/limit.value, own.P99/limit.value
				b.own[own.Name] = own
				add(own.Name, map[int]string{1: "<= 1.6", 64: "<= 1.5"}[n], value{limit.label, 1})
			}
		}
	}
	mixed := value{label: "cuBLASLt's rate in 2k chunks of 8B's linears, on the same FLOP"}
	if ms := b.peers["linears.b2048"].Value; ms > 0 {
		mixed.value = 2048 / ms * 1000 * weights / 2 / mixtureActive
	}
	for _, k := range []string{"2k", "8k"} {
		add("moe.prefill_tok_s."+k, "", mixed)
		add("moe.w8_prefill_tok_s."+k, "", mixed)
	}
	add("mla.decode_pct", ">= 85", value{"reads", 100})
	add("mla.decode_tflops.h128", ">= 500")
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
	add("grammar.step_ratio", "<= 1.03", value{"without masks", 1})
	add("gpu.mixed_itl_ratio", "<= 2", value{"decoding alone", 1})
	add("gpu.mixed_prefill_tok_s", ">= 22000", value{"prefill alone, 8k", b.own["gpu.prefill_tok_s.8k"].Value})
	for _, c := range [][2]string{{"gap125", ">= 0.5"}, {"gap150", ""}, {"gap200", ""}, {"gap300", ""}} {
		f := b.own["inside.prefill_ratio."+c[0]]
		add("inside.prefill_ratio."+c[0], c[1], value{f.Peer, f.PeerValue})
	}
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
		{"multiturn_ratio", ">= 2"}, {"multiturn_ttft_ratio", "<= 0.35"}, {"multiturn_ratio.think2s", ""}, {"multiturn_ttft_ratio.think2s", ""}, {"itl_ratio", "<= 1.05"}} {
		f := b.own["hicache."+c[0]]
		add("hicache."+c[0], c[1], value{f.Peer, f.PeerValue})
	}
	for _, c := range [][2]string{{"step_ratio.b1", "<= 1.5"}, {"step_ratio.b8", ""}, {"step_ratio.b64", "<= 1.5"}, {"allreduce_us.8k", "<= 12"}, {"allreduce_us.64k", ""}, {"allreduce_us.1m", ""}, {"allreduce_us.16m", ""},
		{"allreduce_us.8k_n4", ""}, {"allreduce_us.64k_n4", ""}, {"allreduce_us.1m_n4", ""}, {"allreduce_us.16m_n4", ""}, {"layer_us.70b_w8_b1", ""}, {"layer_us.70b_w8_b8", ""},
		{"layer_us.70b_w8_n4_b1", ""}, {"layer_us.70b_w8_n4_b8", ""}, {"layer_us.70b_b1", ""}, {"layer_us.70b_b8", ""}, {"layer_us.70b_n4_b1", ""}, {"layer_us.70b_n4_b8", ""}} {
		f := b.own["tp."+c[0]]
		add("tp."+c[0], c[1], value{f.Peer, f.PeerValue})
	}
	b.ranks(add)
	b.pushes(add)
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

// pushes are the rows of transfers between two GPUs.
func (b *book) pushes(add func(name, want string, beside ...value)) {
	const nccl = "NCCL send/recv, contiguous"
	for _, piece := range []string{"", ".p64k"} {
		for _, c := range [][2]string{{"1m", ">= 105"}, {"4m", ">= 230"}, {"16m", ">= 320"}, {"64m", ">= 345"}, {"512m", ""}, {"1g", ">= 365"}} {
			add("push.ipc_gbs."+c[0]+piece, c[1], b.peer(nccl, "nccl."+c[0]+piece))
		}
		add("push.ipc_gbs.16sm"+piece, ">= 325", b.peer(nccl, "nccl.512m"+piece))
	}
	add("push.ipc_gbs.run1m", ">= 350", b.peer("copy engine, one run", "copy_engine"))
	add("push.ipc_gbs.run16m", ">= 385", b.peer("copy engine, one run", "copy_engine"))
	add("push.digest_cost_pct", "<= 1", value{"limit", 1})
	for _, c := range [][2]string{{"ttft_overhead_ms.1k", "<= 2.5"}, {"ttft_overhead_pct.8k", "<= 1.5"}, {"ttft_overhead_pct.32k", "<= 0.5"}, {"token2_extra_ms", "<= 1"}, {"itl_ratio", "<= 1.05"},
		{"staged_gbs", ">= 45"}, {"nccl_gbs", ""}, {"nccl_setup_ms", "<= 1000"}, {"nccl_first_ratio", "<= 1.1"}} {
		f := b.own["push."+c[0]]
		add("push."+c[0], c[1], value{f.Peer, f.PeerValue})
	}
}

// modelOf describes the model and load of a figure.
func modelOf(name string) string {
	i := slices.IndexFunc(models, func(m [2]string) bool { ok, _ := path.Match(m[0], name); return ok })
	return models[i][1]
}

const (
	rankPushes = "Llama-3-8B shape's KV, 512 shuffled blocks of 64 KiB a layer, all 32 layers at once or one (_layer), digests and flags"
	kvioModel  = "Llama-3-8B shape's KV, 512 MiB in shuffled blocks of all 32 layers, block-first host memory, "
	piecesOf   = "pieces of %s, shuffled, two processes, digests and flag"
	runsOf     = "runs of %s by the copy engine, 1 GiB, two processes, digests and flag"
	stageModel = "pool of 4 layers, 64 KiB a block of a layer, scattered at decode, digests verified"
)

// models are those of figures whose names match a pattern; the first match counts.
var models = [][2]string{
	{"kvio.*.t16", kvioModel + "4 CTAs"},
	{"kvio.*.t64", kvioModel + "4 CTAs"},
	{"kvio.*", kvioModel + "at most 8 CTAs"},
	{"push.ipc_gbs.run1m", fmt.Sprintf(runsOf, "1 MiB")},
	{"push.ipc_gbs.run16m", fmt.Sprintf(runsOf, "16 MiB")},
	{"push.*.p64k", fmt.Sprintf(piecesOf, "64 KiB")},
	{"push.ipc_gbs.*", fmt.Sprintf(piecesOf, "32 KiB")},
	{"push.digest_cost_pct", fmt.Sprintf(piecesOf, "32 KiB")},
	{"push.staged_*", stageModel},
	{"push.nccl_*", stageModel},
	{"push.*", "Llama-3-8B shape with 512 tokens to draw from, random bf16 weights, 2,048 tokens a step; streams of 4,000 tokens"},
	{"tp.pushes_here.*", rankPushes + ", all ranks of both sides on one GPU"},
	{"tp.pushes.*", rankPushes + ", the ranks of a side on one GPU each"},
	{"tp.*hf_*", "random models that the ranks can have, on one GPU: Llama, Qwen2, Qwen3; GQA 1 to 8"},
	{"tp.apart.step_ratio.*", "Llama-3-8B shape, random bf16 weights, two ranks on a GPU each beside one, contexts of 1k"},
	{"tp.apart.allreduce_us.*", "rows of 4,096 bf16, a GPU a rank, graphs of 200"},
	{"tp.apart.layer_us.70b_w8_*", "Llama-3-70B shape, FP8 weights, a GPU a rank, contexts of 1k"},
	{"tp.apart.layer_us.*", "Llama-3-70B shape, random bf16 weights, a GPU a rank, contexts of 1k"},
	{"tp.layer_us.70b_b*", "Llama-3-70B shape, random bf16 weights, two ranks on one GPU, contexts of 1k"},
	{"tp.layer_us.70b_n4_*", "Llama-3-70B shape, random bf16 weights, four ranks on one GPU, contexts of 1k"},
	{"tp.layer_us.70b_w8_n4_*", "Llama-3-70B shape, FP8 weights, four ranks on one GPU, contexts of 1k"},
	{"tp.step_ratio.*", "Llama-3-8B shape, random bf16 weights, two ranks on one GPU beside one, contexts of 1k"},
	{"tp.allreduce_us.*", "rows of 4,096 bf16, all ranks on one GPU, graphs of 200"},
	{"tp.layer_us.*", "Llama-3-70B shape, FP8 weights, two ranks on one GPU, contexts of 1k"},
	{"moe.decode_ratio.*", "Qwen3-30B-A3B shape, random FP8 weights, contexts of 1k"},
	{"moe.w8_*", "Qwen3-30B-A3B shape, random FP8 weights, contexts of 1k"},
	{"moe.*", "Qwen3-30B-A3B shape, random bf16 weights, contexts of 1k"},
	{"mla.decode_pct", "latents of 512 + 64 in bf16, 16 query heads, 64 sequences of 4,096 positions"},
	{"mla.decode_tflops.h128", "latents of 512 + 64 in bf16, 128 query heads, 64 sequences of 4,096 positions"},
	{"grammar.step_*", "Llama-3-8B shape, random bf16 weights, 64 draws along a grammar of JSON objects, a synthetic vocabulary of 128k, contexts of 1k"},
	{"gpu.endurance_*", "8 layers of 1024, random bf16 weights, batch_invariant, 200 clients"},
	{"gpu.hf_*", "10 random models: Llama, Qwen2, Qwen3; GQA 1 to 8"},
	{"*", "Llama-3-8B shape, random bf16 weights"},
}

// ranks has the figures of ranks beside others': pushes between unequal numbers of them, logits, the all-reduce of two
// GPUs beside NCCL's.
func (b *book) ranks(add func(name, want string, beside ...value)) {
	own := func(name, want string, more ...value) {
		f := b.own[name]
		add(name, want, append(more, value{f.Peer, f.PeerValue})...)
	}
	for _, pair := range []string{"1to1", "1to2", "2to1", "2to2", "2to4", "4to2", "1to4", "4to1", "4to4"} {
		for _, kind := range []string{"tp.pushes.", "tp.pushes_here."} {
			own(kind+pair, "")
			own(kind+pair+"_layer", "")
		}
	}
	for _, n := range []string{"n2", "n4"} {
		add("tp.hf_logits_error_ratio."+n, "<= 2", value{"transformers' own bf16", 1}, value{"one rank", b.own["gpu.hf_logits_error_ratio"].Value})
	}
	add("tp.fp16_hf_logits_error_ratio.n2", "<= 2", value{"transformers' own fp16", 1}, value{"one rank", b.own["gpu.fp16_hf_logits_error_ratio"].Value})
	for _, size := range []string{"8k", "64k", "1m", "16m", "8k_n4", "64k_n4", "1m_n4", "16m_n4"} {
		own("tp.apart.allreduce_us."+size, "", b.peer("NCCL, PyTorch, in a graph", "allreduce."+size))
	}
	for _, name := range []string{"step_ratio.b1", "step_ratio.b8", "step_ratio.b64", "layer_us.70b_w8_b1", "layer_us.70b_w8_b8", "layer_us.70b_b1", "layer_us.70b_b8",
		"layer_us.70b_w8_n4_b1", "layer_us.70b_w8_n4_b8", "layer_us.70b_n4_b1", "layer_us.70b_n4_b8"} {
		own("tp.apart."+name, "")
	}
}
