package main

import (
	"fmt"
	"slices"
	"strings"
)

// stage is the unit that a call can name. It starts only if its seconds fit, and is not repeated
// once it has passed.
type stage struct {
	name, about string
	seconds     int    // on an H100; the limit is twice that
	gpus        int    // that it needs; 0 is 1
	python      string // modules that it needs, space separated
	tool        string // of compute-sanitizer, under which parts run in parallel
	beside      int    // most parts in parallel; 0: no limit
	parts       []part
}

// part is one process with its own verdict.
type part struct {
	name    string   // "FAMILY" or "FAMILY/CASE"
	run     []string // a program of the folder, or python3, and its arguments
	env     []string // NAME=VALUE, unless the environment has NAME
	seconds int      // its limit; 0: the stage's
	maybe   bool     // the test may not exist
}

// family is a set of related tests of the kernels.
type family struct {
	name      string
	tests     []string // of cuda.test
	split     []string // tests whose subtests, one per architecture, are parts under a sanitizer
	processes []string // tests that start a process; not run under a sanitizer, as others run their kernels
	race      []string // tests or subtests for racecheck that launch all kernels which the probe lacks
	fp16      bool     // run once more in fp16
}

var fp16 = []string{"XPYD_CUDA_FP16=1"}

var families = []family{
	{name: "model", tests: []string{"TestLogits", "TestRunsAreEqual", "TestDecodeLengths", "TestShortChunks", "TestMixedSteps", "TestOnLayer", "TestHiddenStates", "TestHiddenStatesOverlap", "TestChoices"}, split: []string{"TestLogits", "TestHiddenStates"}, processes: []string{"TestChoices"}, race: []string{"TestShortChunks/^qwen2_gqa7_64$", "TestOnLayer", "TestHiddenStatesOverlap"}, fp16: true},
	{name: "invariant", tests: []string{"TestBatchInvariant", "TestInvariantWithoutCuBLAS", "TestInvariantSmallVocabulary", "TestInvariantRefused", "TestInvariantDraws", "TestInvariantHiddenStates", "TestVerify"}, split: []string{"TestBatchInvariant"}, fp16: true},
	{name: "fp8", tests: []string{"TestKV8Rows", "TestKV8Logits", "TestKV8DecodeLengths", "TestKV8Pool", "TestW8Logits", "TestW8Loads"}, split: []string{"TestKV8Logits", "TestW8Logits"}, race: []string{"TestKV8Rows/^llama_gqa4_128_by_16$", "TestKV8Pool", "TestW8Loads"}},
	{name: "mixture", tests: []string{"TestMixtures", "TestMixtureSizes"}, race: []string{"TestMixtureSizes"}, fp16: true},
	{name: "range", tests: []string{"TestFP16Range", "TestFP16Peers"}},
	{name: "sampler", tests: []string{"TestDraws", "TestDrawsAmongEquals", "TestDrawDistribution", "TestDrawOfNaN", "TestLogprobs", "TestMaskEdges", "TestMaskedLogprobs"}, race: []string{"TestLogprobs/^50$", "TestMaskedLogprobs"}},
	{name: "pool", tests: []string{"TestDigestFollowsOverwrites", "TestPoolMovesRows", "TestPoolBesideSteps", "TestPoolRefusesBadRanges"}, race: []string{"TestDigestFollowsOverwrites", "TestPoolMovesRows"}},
	{name: "host", tests: []string{"TestHostMoves", "TestHostMovesKeepDigests", "TestArrivals", "TestArrivalsBeside", "TestGates"}, race: []string{"TestHostMoves", "TestHostMovesKeepDigests", "TestArrivals"}},
	{name: "push", tests: []string{"TestPush", "TestPushLong", "TestPushBehindStep", "TestMovesRefuse", "TestMovesLate", "TestDrain", "TestPeerProcess"}, processes: []string{"TestPeerProcess"}, race: []string{"TestPush/^4_heads_of_128,_16_tokens$", "TestPush/^2_heads_of_80,_5_tokens$", "TestPushLong"}},
	{name: "refill", tests: []string{"TestRefill", "TestRefillConverts", "TestRefillSpoiled", "TestRefillRefuses", "TestRefillProcess"}, processes: []string{"TestRefillProcess"}},
	{name: "overlap", tests: []string{"TestOverlapEqualsSteps", "TestOverlappingChunks", "TestAppendsOfChangingSteps", "TestLaunchRefused", "TestHeldEqualsSteps"}, fp16: true},
}

// ranks are tests of several ranks on one device, which have a stage of their own: CUDA must load all
// code at once, and under a sanitizer, which lets one kernel run at a time, ranks that compute together would
// wait for each other for ever.
var ranks = family{name: "ranks", tests: []string{"TestRanksReduce", "TestRanksSignalled", "TestRanksExchange", "TestRanksLogits", "TestRanksHiddenStates", "TestRanksRunsAreEqual", "TestRanksFP8", "TestRanksInvariant", "TestRanksOverlap", "TestRanksHeldEqualsSteps", "TestRanksPool", "TestRanksHostMoves", "TestRanksRegister", "TestRanksArrivals", "TestRanksHang", "TestRanksDead", "TestRanksRefused", "TestRanksPush", "TestRanksRefill", "TestRanksPushRefused", "TestRanksAlone"}}

// eager has CUDA do so, and a test need not start another process for it.
var eager = []string{"CUDA_MODULE_LOADING=EAGER", "CUDA_DEVICE_MAX_CONNECTIONS=32"}

// apart gives each rank a GPU of its own.
var apart = []string{"XPYD_CUDA_APART=1"}

// byNCCL has ranks exchange through NCCL, and withoutPeers has it do so as where no GPU reaches another.
var (
	byNCCL       = slices.Concat(apart, []string{"XPYD_CUDA_EXCHANGE=nccl"})
	withoutPeers = slices.Concat(byNCCL, []string{"NCCL_P2P_DISABLE=1"})
)

// rankSpeed has figures of several ranks.
func rankSpeed(name, what string, env ...string) part {
	return tests("cuda.test", name, 150, slices.Concat(eager, env, []string{"XPYD_CUDA_BENCH=" + what}), "TestRanksSpeed")
}

// rankChecks are tests of ranks, or a subtest, for a sanitizer.
func rankChecks(list ...string) (parts []part) {
	for _, t := range list {
		t, of, _ := strings.Cut(t, "/")
		p := sub(ranks, t, of)
		p.env = eager
		parts = append(parts, p)
	}
	return parts
}

// alone needs the device for itself and has no kernels of its own.
var alone = []string{"TestMemory"}

// figureTests only print what they measure, so they are in no family.
var figureTests = []string{"TestSpeed", "TestInside", "TestPushBeside", "TestLinksBeside", "TestRanksSpeed"}

// architectures are the subtests of model_test.go's families() by their -test.run names. FP8 KV,
// FP8 weights and batch invariance lack some, which passes.
var architectures = []string{
	"llama_mha_64", "llama_gqa4_128", "llama_gqa8_128", "qwen2_gqa7_64", "qwen3_gqa2_128",
	"llama_gqa2_8", "qwen3_gqa2_80", "gqa3_96", "gqa17_64", "llama_gqa4_256x", "moe_4_of_4", "moe_8_of_8",
}

func tests(bin, name string, seconds int, env []string, list ...string) part {
	return part{name: name, run: []string{bin, "-test.v", "-test.count=1", "-test.run", "^(" + strings.Join(list, "|") + ")$"}, env: env, seconds: seconds}
}

func speed(name, what string, env ...string) part {
	return tests("cuda.test", name, 0, append(env, "XPYD_CUDA_BENCH="+what), "TestSpeed")
}

func hicache(name, what string, env ...string) part {
	return tests("worker.test", name, 0, append(env, "XPYD_CUDA_BENCH="+what), "TestHiCache")
}

func peers(names ...string) part {
	return part{name: names[0], run: append([]string{"python3", "cuda-peers.py"}, names...)}
}

// links pushes between two processes beside NCCL; heads, the number of KV heads, sets the piece size.
func links(name, heads string) part {
	return part{name: name, run: []string{"moves", "push", "libnccl.so.2", heads}, seconds: 60}
}

// faults strikes a fleet of 2P2D over one transport.
func faults(transport string) part {
	return part{name: transport, seconds: 170, run: []string{"python3", "push-faults", "--xpyd", "xpyd", "--library", "libxpyd_cuda.so",
		"--make-model", "--tokenizer", ".", "--transports", transport}}
}

func suite() (parts []part) {
	for _, f := range families {
		limit := 60
		if f.split != nil { // they wait for the CPU's logits
			limit = 150
		}
		parts = append(parts, tests("cuda.test", f.name, limit, nil, f.tests...))
		if f.fp16 {
			parts = append(parts, tests("cuda.test", f.name+" in fp16", limit, fp16, f.tests...))
		}
	}
	return append(parts, tests("cuda.test", "alone", 60, nil, alone...))
}

// slicesOf splits the probe's cases into of parts for a sanitizer.
func slicesOf(of int, name string, run ...string) (parts []part) {
	for i := range of {
		parts = append(parts, part{name: fmt.Sprintf("%s/%d", name, i+1), run: append([]string{"probe", "check"}, run...), env: []string{fmt.Sprintf("PART=%d/%d", i+1, of), "VERBOSE=1"}})
	}
	return parts
}

// sanitized is what runs under a tool: the probe's cases without its oracle, and each test by
// itself, so that one that hangs has a name.
func sanitized() []part {
	parts := slicesOf(16, "probe", "quick")
	for _, f := range families {
		for _, t := range f.tests {
			switch {
			case slices.Contains(f.processes, t):
			case slices.Contains(f.split, t):
				for _, a := range architectures {
					p := sub(f, t, "^"+a+"$")
					p.maybe = true
					parts = append(parts, p)
				}
			default:
				parts = append(parts, sub(f, t, ""))
			}
		}
	}
	return parts
}

// raced is the few tests for racecheck, which takes minutes and gigabytes of host memory per model.
func raced() (parts []part) {
	for _, f := range families {
		for _, t := range f.race {
			t, of, _ := strings.Cut(t, "/")
			parts = append(parts, sub(f, t, of))
		}
	}
	return parts
}

// sub is one test of a family, or its subtests that match of.
func sub(f family, test, of string) part {
	p := tests("cuda.test", f.name+"/"+test, 0, nil, test)
	if of != "" {
		p.name += "/" + strings.NewReplacer("^", "", "$", "").Replace(of)
		p.run[len(p.run)-1] += "/" + of
	}
	return p
}

// plan is every stage, the most valuable first.
func plan() []stage {
	return []stage{
		{name: "probe", about: "kernels one by one against double precision, draws against sorting", seconds: 65, parts: []part{
			{name: "check", run: []string{"probe", "check"}}, {name: "check in fp16", run: []string{"probe", "check"}, env: []string{"TYPE=fp16"}},
			{name: "draw", run: []string{"probe", "check", "draw", "quick"}}}},
		{name: "suite", about: "the CUDA backend against the CPU's, a family of tests at a time", seconds: 210, parts: suite()},
		{name: "worker", about: "a worker on the GPU; the same tokens from host memory, an SSD, a store, a peer, fifty at once", seconds: 90, parts: []part{tests("worker.test", "worker", 0, nil, "TestOnGPU", "TestOnGPUInFP16", "TestGPUTiers", "TestGPUTiersInvariant", "TestGPUSameTokens", "TestGPUPeers", "TestGPUBound")}},
		{name: "ranks", about: "tensor parallelism, all ranks on one GPU: against one rank and the CPU", seconds: 170, parts: []part{
			tests("cuda.test", "reduce", 60, eager, "TestRanksReduce", "TestRanksSignalled", "TestRanksHang", "TestRanksDead", "TestRanksRefused"),
			tests("cuda.test", "model", 120, eager, "TestRanksLogits", "TestRanksRunsAreEqual", "TestRanksOverlap", "TestRanksHeldEqualsSteps", "TestRanksPool", "TestRanksHostMoves", "TestRanksRegister", "TestRanksArrivals"),
			tests("cuda.test", "forms", 120, eager, "TestRanksFP8", "TestRanksInvariant"),
			tests("cuda.test", "model in fp16", 120, slices.Concat(eager, fp16), "TestRanksReduce", "TestRanksLogits", "TestRanksOverlap", "TestRanksPool"),
		}},
		{name: "ranks-push", about: "pushes between unequal numbers of ranks, beside what one rank holds; fleets of workers of several ranks", seconds: 150, parts: []part{
			tests("cuda.test", "pushes", 120, eager, "TestRanksPush", "TestRanksRefill", "TestRanksPushRefused", "TestRanksAlone"),
			{name: "fleets", run: []string{"python3", "ranks-test", "--xpyd", "xpyd"}, seconds: 180},
			{name: "fleets by pinned", run: []string{"python3", "ranks-test", "--xpyd", "xpyd", "--transport", "pinned", "--ranks", "2:1"}, seconds: 90}}},
		{name: "walls", about: "KV between workers in namespaces of their own, as containers have them; needs unshare as root", seconds: 60, parts: []part{
			{name: "walls", run: []string{"python3", "walls-test", "--xpyd", "xpyd"}},
			{name: "walls by pinned", run: []string{"python3", "walls-test", "--xpyd", "xpyd", "--transport", "pinned"}}}},
		{name: "ranks-speed", about: "all ranks on one GPU: a step beside one rank's, the all-reduce alone, pushes, a 70B shape's layer", seconds: 150, parts: []part{
			rankSpeed("speed", "reduce steps push"), rankSpeed("70b", "70b"), rankSpeed("70b by 4", "70b:40@4"),
			rankSpeed("70b in bf16", "70b16:32"), rankSpeed("70b in bf16 by 4", "70b16:32@4")}},
		{name: "ranks-hf", about: "logits of 2 and of 4 ranks on one GPU beside transformers'", seconds: 90, python: "torch transformers", parts: []part{
			{name: "by 2", run: []string{"python3", "cuda-hf", "worker.test", "ranks=2"}}, {name: "by 4", run: []string{"python3", "cuda-hf", "worker.test", "ranks=4"}},
			{name: "by 2 in fp16", run: []string{"python3", "cuda-hf", "worker.test", "fp16", "ranks=2"}}}},
		{name: "ranks-memcheck", about: "the kernels of ranks, one rank after the other, and pushes between ranks, under compute-sanitizer", seconds: 120, tool: "memcheck", parts: rankChecks("TestRanksAlone", "TestRanksSignalled", "TestRanksPush/^4_heads_of_128,_16_tokens,_2_to_4$", "TestRanksPush/^4_heads_of_128,_16_tokens,_4_to_1$", "TestRanksPush/^4_heads_of_128_in_FP8,_2_to_4$", "TestRanksPush/^2_heads_of_80,_5_tokens,",
			"TestRanksRefill/^blocks_of_5_from_16$/^1_to_2$", "TestRanksRefill/^FP8_blocks_of_32_from_bf16$/^4_to_1$", "TestRanksPushRefused")},
		{name: "ranks-racecheck", about: "the same", seconds: 120, tool: "racecheck", beside: 6, parts: rankChecks("TestRanksAlone", "TestRanksSignalled", "TestRanksRefill/^blocks_of_5_from_16$/^2_to_4$", "TestRanksPush/^4_heads_of_128,_16_tokens,_2_to_4$", "TestRanksPush/^4_heads_of_128_in_FP8,_4_to_1$")},
		{name: "ranks-synccheck", about: "the kernels of ranks, one rank after the other", seconds: 60, tool: "synccheck", beside: 6, parts: rankChecks("TestRanksAlone", "TestRanksSignalled")},
		{name: "ranks-nccl", about: "a GPU a rank: sums through NCCL beside peer memory, NCCL's links between unequal numbers of ranks; fleets", seconds: 400, gpus: 2, parts: []part{
			tests("cuda.test", "reduce", 60, slices.Concat(eager, byNCCL), "TestRanksReduce"),
			tests("cuda.test", "same bits", 90, slices.Concat(eager, apart), "TestRanksExchange"),
			tests("cuda.test", "faults", 60, slices.Concat(eager, byNCCL), "TestRanksHang", "TestRanksDead"),
			tests("stage.test", "links", 120, slices.Concat(eager, []string{"XPYD_CUDA_PUSH=1"}), "TestStagedRanksOnGPUs"),
			{name: "fleets by nccl", run: []string{"python3", "ranks-test", "--xpyd", "xpyd", "--transport", "nccl", "--ranks", "2:1,1:2,2:2"}, seconds: 150},
			tests("cuda.test", "steps", 120, slices.Concat(eager, byNCCL), "TestRanksLogits", "TestRanksRunsAreEqual", "TestRanksOverlap", "TestRanksHeldEqualsSteps"),
			tests("cuda.test", "without peer access", 90, slices.Concat(eager, withoutPeers), "TestRanksReduce", "TestRanksExchange"),
			rankSpeed("speed", "reduce steps", apart...), rankSpeed("speed by NCCL", "reduce steps", byNCCL...), rankSpeed("speed without peer access", "reduce steps", withoutPeers...)}},
		{name: "ranks-apart", about: "a GPU a rank: answers, pushes, speed, the all-reduce beside NCCL's; fleets", seconds: 240, gpus: 2, parts: []part{
			tests("cuda.test", "model", 120, slices.Concat(eager, apart), "TestRanksReduce", "TestRanksLogits", "TestRanksPush", "TestRanksRefill"),
			tests("cuda.test", "faults", 60, slices.Concat(eager, apart), "TestRanksHang", "TestRanksDead"),
			rankSpeed("pushes", "push"), rankSpeed("speed", "reduce steps", apart...), rankSpeed("70b", "70b 70b@4", apart...), rankSpeed("70b in bf16", "70b16:32 70b16:64@4", apart...),
			peers("allreduce"),
			{name: "fleets", run: []string{"python3", "ranks-test", "--xpyd", "xpyd"}, seconds: 180}}},
		{name: "mixture", about: "steps of a mixture of experts of a 30B-A3B shape", seconds: 120, parts: []part{peers("memory"),
			speed("w8", "b1 b16 b64 b256 2k 8k", "XPYD_CUDA_MOE=1", "XPYD_CUDA_W8=1"), speed("speed", "b1 b16 b64 b256 2k 8k", "XPYD_CUDA_MOE=1")}},
		{name: "latent", about: "decode attention over latents: against double precision, and its speed", seconds: 40, parts: []part{
			{name: "check", run: []string{"probe", "check", "latent"}}, {name: "check in fp16", run: []string{"probe", "check", "latent"}, env: []string{"TYPE=fp16"}},
			{name: "bench", run: []string{"probe", "bench", "latent"}}}},
		{name: "hf", about: "logits beside transformers', ten random models", seconds: 90, python: "torch transformers", parts: []part{
			{name: "logits", run: []string{"python3", "cuda-hf", "worker.test"}}, {name: "logits in fp16", run: []string{"python3", "cuda-hf", "worker.test", "fp16"}}}},
		{name: "decode", about: "decode steps of Llama-3-8B's shape, the device's idle time", seconds: 40, parts: []part{speed("decode", "b1 b8 b64 b256")}},
		{name: "prefill", about: "prefill in chunks of 2k and 8k", seconds: 45, parts: []part{speed("prefill", "2k 8k 32k 8k@8192 32k@8192")}},
		{name: "masks", about: "64 draws that grammars bind beside 64 that nothing does", seconds: 40, parts: []part{speed("masks", "masks")}},
		{name: "mixed", about: "64 streams beside 8k prompts", seconds: 20, parts: []part{speed("mixed", "mixed")}},
		{name: "inside", about: "64 streams beside 8k prompts: in steps that mix them, and each on multiprocessors of its own", seconds: 150,
			parts: []part{tests("cuda.test", "inside", 0, []string{"XPYD_CUDA_BENCH=inside"}, "TestInside")}},
		{name: "kernels", about: "single kernels' figures", seconds: 40, parts: []part{{name: "bench", run: []string{"probe", "bench"}}}},
		{name: "peers", about: "PyTorch's bandwidth, attention and linears; FlashInfer where it is", seconds: 60, python: "torch",
			parts: []part{peers("memory", "attention", "sampling", "linears"), peers("flashinfer")}},
		{name: "endurance", about: "random load, aborts, a full pool: tokens of a quiet run (XPYD_CUDA_ENDURANCE)", seconds: 110,
			parts: []part{tests("worker.test", "load", 0, []string{"XPYD_CUDA_ENDURANCE=60s"}, "TestGPUEndurance")}},
		{name: "kvio", about: "blocks to and from pinned memory", seconds: 60, parts: []part{{name: "host", run: []string{"moves", "host"}}, {name: "arrive", run: []string{"moves", "arrive"}}}},
		{name: "hicache", about: "prefixes in host memory: first tokens, overlap, writing through", seconds: 120,
			parts: []part{hicache("hits", "8k 32k overlap"), hicache("itl", "itl")}},
		{name: "memcheck", about: "the kernel suite under compute-sanitizer", seconds: 150, tool: "memcheck", parts: sanitized()},
		{name: "synccheck", about: "the same", seconds: 120, tool: "synccheck", parts: sanitized()},
		{name: "racecheck", about: "kernels one by one, and draws", seconds: 240, tool: "racecheck", parts: append(slicesOf(16, "probe", "quick"), slicesOf(8, "draw", "draw", "few")...)},
		{name: "racesteps", about: "all other kernels, by a few tests", seconds: 240, tool: "racecheck", beside: 6, parts: raced()},
		{name: "multiturn", about: "64 clients, 112 conversations of four times the pool; the same thinking for 2 s", seconds: 300,
			parts: []part{hicache("multiturn", "multiturn"), hicache("think2s", "multiturn", "XPYD_CUDA_THINK=2s")}},
		{name: "hits", about: "steps after a cached prefix", seconds: 20, parts: []part{speed("hits", "hit16@8k hit16@32k hit128@8k")}},
		{name: "fp8", about: "FP8 KV and weights: speed, and how far logits move", seconds: 110, parts: []part{
			speed("kv8", "b64 b256 b64l4 2k", "XPYD_CUDA_KV8=1"), speed("w8", "b1 b8 b64 2k", "XPYD_CUDA_W8=1"),
			speed("kv8 quality", "quality", "XPYD_CUDA_KV8=1"), speed("w8 quality", "quality", "XPYD_CUDA_W8=1")}},
		{name: "fp16", about: "fp16's speed", seconds: 45, parts: []part{speed("fp16", "b1 b64 2k 8k", fp16...)}},
		{name: "invariant", about: "what batch_invariant costs", seconds: 45, parts: []part{speed("invariant", "b1 b8 b64 b256 2k 8k", "XPYD_CUDA_INVARIANT=1")}},
		{name: "transformers", about: "prefill and decode of transformers", seconds: 80, python: "torch transformers", parts: []part{peers("transformers")}},
		{name: "gemm", about: "own projections beside cuBLASLt's", seconds: 40, parts: []part{{name: "gemm", run: []string{"probe", "bench", "gemm"}}, {name: "any", run: []string{"probe", "bench", "any"}}}},
		{name: "pair", about: "pushes, refills and staged transfers between two GPUs; a worker on the last one", seconds: 180, gpus: 2, parts: []part{
			tests("worker.test", "named", 60, nil, "TestNamedGPU"),
			tests("cuda.test", "push", 60, nil, "TestPush", "TestPushLong", "TestPushBehindStep", "TestDrain", "TestPeerProcess"),
			tests("cuda.test", "refill", 60, nil, "TestRefill", "TestRefillConverts", "TestRefillSpoiled", "TestRefillProcess"),
			tests("stage.test", "staged", 90, []string{"XPYD_CUDA_PUSH=1"}, "TestStagedOnGPUs"),
			tests("cuda.test", "links", 40, []string{"XPYD_CUDA_PUSH=1"}, "TestLinksBeside"),
			tests("cuda.test", "beside", 90, []string{"XPYD_CUDA_PUSH=1"}, "TestPushBeside"),
			{name: "refill speed", run: []string{"cuda.test", "-test.run", "^$", "-test.bench", "Refill", "-test.benchtime", "50x"}, seconds: 120}}},
		{name: "push", about: "pushes from process to process in pieces and long runs, beside NCCL and the copy engine", seconds: 70, gpus: 2, parts: []part{links("32 KiB", "4"), links("64 KiB", "8")}},
		{name: "ttft", about: "first tokens of a remote prefill, and decoding beside one; an 8B shape", seconds: 160, gpus: 2, python: "torch safetensors", parts: []part{
			{name: "8b", run: []string{"python3", "push-test", "--xpyd", "xpyd", "--library", "libxpyd_cuda.so", "--make-model", "--shape", "8b", "--tokenizer", ".", "--kv-memory", "60GiB",
				"--step-tokens", "2048", "--step-time", "10s", "--rest", "0.6", "--lengths", "1000,8000,32000", "--repeat", "5", "--streams", "64", "--no-faults"}}}},
		{name: "faults", about: "2P2D under load: clients leave, workers join, drain, are killed and stopped, decode is full", seconds: 360, gpus: 2, python: "torch safetensors",
			parts: []part{faults("cudaipc"), faults("nccl"), faults("pinned"), faults("tcp")}},
		{name: "peer", about: "an 8k prefix from another GPU's pool, two workers of an 8B shape", seconds: 140, gpus: 2, parts: []part{
			{name: "8k", run: []string{"bench", "peer", "-xpyd", "xpyd", "-library", "libxpyd_cuda.so", "-gpus", "0,1"}}}},
	}
}
