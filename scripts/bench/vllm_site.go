package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// start starts a server and waits until it answers; settings are lines of our worker's
// configuration. stop ends it, also after a failed start.
func (o *vllm) start(ctx context.Context, server string, settings ...string) (url string, stop func() error, err error) {
	var procs []*harness.Process
	stop = func() (err error) {
		for _, p := range slices.Backward(procs) {
			if server == oursName { // vLLM's exit status says nothing
				err = errors.Join(err, p.Stop())
			}
			p.Kill()
		}
		return err
	}
	if server == vllmName && o.peer != "" {
		return o.peer, stop, o.answers(ctx, o.peer)
	}
	if err := o.prepare(ctx); err != nil {
		return "", stop, err
	}
	addr, err := harness.FreeAddr()
	if err != nil {
		return "", stop, err
	}
	url = "http://" + addr
	if server == vllmName {
		p, err := o.Bench.Start(o.engine(addr))
		if err != nil {
			return "", stop, err
		}
		procs = append(procs, p)
		return url, stop, o.answers(ctx, url, procs...)
	}
	worker, err := harness.FreeAddr()
	if err != nil {
		return "", stop, err
	}
	config, data := filepath.Join(o.Dir, "router.yaml"), filepath.Join(o.Dir, "data")
	text := fmt.Sprintf("fleet: {listen: \"127.0.0.1:0\"}\nstatic:\n  - {id: w0, role: decode, url: \"http://%s\", dialect: openai, model: model}\n", worker)
	if err := errors.Join(os.RemoveAll(data), os.WriteFile(config, []byte(text), 0o600)); err != nil {
		return "", stop, err
	}
	own, worked := plainEnv(), filepath.Join(o.Dir, "worker.yaml")
	if err := os.WriteFile(worked, []byte(strings.Join(settings, "\n")), 0o600); err != nil {
		return "", stop, err
	}
	args := []string{o.XPYD, "decode", "--config", worked, "--trust-everyone", "--id", "w0", "--served-name", "model", "--device", o.device, "--listen", worker}
	if o.model != "" {
		args = append(args, "--model", o.model)
	}
	if o.library != "" {
		own = append(own, "XPYD_CUDA_LIB="+o.library)
	}
	for _, s := range []harness.Spec{
		{Name: "decode", Argv: args, Env: own},
		{Name: "router", Argv: []string{o.XPYD, "router", "--trust-everyone", "--config", config, "--listen", addr, "--admin", "127.0.0.1:0", "--data", data}, Env: own},
	} {
		p, err := o.Bench.Start(s)
		if err != nil {
			return "", stop, err
		}
		procs = append(procs, p)
	}
	return url, stop, o.answers(ctx, url, procs...)
}

// engine is vllm serve at its defaults but for what is given.
func (o *vllm) engine(addr string, more ...string) harness.Spec {
	_, port, _ := strings.Cut(addr, ":")
	env := append(os.Environ(), "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "HF_HUB_OFFLINE=1", "VLLM_HOST_IP=127.0.0.1")
	return harness.Spec{Name: "vllm", Env: env, Argv: append([]string{o.python, "-m", "vllm.entrypoints.cli.main", "serve", o.model,
		"--served-model-name", "model", "--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16", "--max-model-len", "8192"}, more...)}
}

// prepare builds what was not given, and makes the model unless an earlier run left it.
func (o *vllm) prepare(ctx context.Context) (err error) {
	if o.device == "cpu" {
		o.XPYD, err = o.Binary(ctx)
		return err
	}
	if err := buildForGPU(ctx, o.Bench, &o.library); err != nil {
		return err
	}
	if o.XPYD, err = o.Binary(ctx); err != nil {
		return err
	}
	o.model = filepath.Join(o.large, "xpyd-bench-8b")
	if _, err := os.Stat(filepath.Join(o.model, "made")); err == nil {
		return nil
	}
	began := time.Now()
	if err := writeVLLMModel(o.model); err != nil {
		return err
	}
	o.Sayf("a model of random weights: %.1f s", time.Since(began).Seconds())
	return os.WriteFile(filepath.Join(o.model, "made"), nil, 0o644)
}

// answers waits until a server generates.
func (o *vllm) answers(ctx context.Context, url string, procs ...*harness.Process) error {
	client := http.Client{Timeout: 20 * time.Second}
	return harness.Until(ctx, 4*time.Minute, func() error {
		resp, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader([]byte(`{"model":"model","prompt":[300,301],"max_tokens":1}`)))
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, resp.Status)
		}
		return nil
	}, procs...)
}

// writeVLLMModel writes a model of Llama-3-8B's shape and random weights, with a byte-level BPE
// vocabulary of the same size, each of whose tokens is ASCII text: an answer's tokens are all seen.
func writeVLLMModel(dir string) error {
	const ordinary, special = 128000, 256
	c := shape8B(modeltest.Tiny("llama"))
	c.Vocab, c.MaxPositions, c.BOS, c.EOS = ordinary+special, 8192, []int32{ordinary}, []int32{ordinary + 1}
	tokens, config, err := wideTokenizer(ordinary, special)
	if err != nil {
		return err
	}
	return modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16, Shards: c.Layers,
		Files: map[string][]byte{"tokenizer.json": tokens, "tokenizer_config.json": config}})
}

// wideTokenizer returns a tokenizer.json with the 256 bytes and then strings of two to four
// lower-case letters, and its tokenizer_config.json.
func wideTokenizer(ordinary, special int) (tokens, config []byte, err error) {
	vocab, merges := map[string]int{}, [][2]string{}
	other := 256
	for b := range 256 { // bytes are written as GPT-2 does
		r := rune(b)
		if b < 33 || b > 126 && b < 161 || b == 173 {
			r = rune(other)
			other++
		}
		vocab[string(r)] = b
	}
	merge := func(a, b string) {
		if len(vocab) < ordinary {
			vocab[a+b] = len(vocab)
			merges = append(merges, [2]string{a, b})
		}
	}
	var pairs []string
	for a := 'a'; a <= 'z'; a++ {
		for b := 'a'; b <= 'z'; b++ {
			merge(string(a), string(b))
			pairs = append(pairs, string([]rune{a, b}))
		}
	}
	for _, p := range pairs {
		for c := 'a'; c <= 'z'; c++ {
			merge(p, string(c))
		}
	}
	for _, p := range pairs {
		for _, q := range pairs {
			merge(p, q)
		}
	}
	mark := func(i int) string { return fmt.Sprintf("<|special_%d|>", i) }
	marks := make([]map[string]any, special)
	for i := range marks {
		marks[i] = map[string]any{"id": ordinary + i, "content": mark(i), "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	tokens, err = json.Marshal(map[string]any{"version": "1.0", "added_tokens": marks, "pre_tokenizer": level, "decoder": level,
		"model": map[string]any{"type": "BPE", "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges}})
	if err != nil {
		return nil, nil, err
	}
	config, err = json.Marshal(map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": mark(0), "eos_token": mark(1),
		"model_max_length": 8192, "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"})
	return tokens, config, err
}
