package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// benchFlags are the flags of every benchmark that posts requests.
type benchFlags struct {
	urls, headers                     []string
	endpoint, model, apiKey, extra    string
	noStream, ignoreEOS, insecure     bool
	timeout, drain, duration, ramp    time.Duration
	requests, warmup                  int
	seed                              uint64
	input, output                     string
	prefix, groups                    int
	share                             float64
	calibrate                         bool
	slo, jsonPath, htmlPath, progress string
	limits                            record.SLO
	load                              report.Workload
}

func (b *benchFlags) register(cmd *cobra.Command, endpoint string) {
	f := cmd.Flags()
	f.StringArrayVar(&b.urls, "url", nil, "address of the server, with or without /v1; repeat it for more servers, used in turn")
	f.StringVar(&b.endpoint, "endpoint", endpoint, "chat or completions")
	f.StringVar(&b.model, "model", "", "model to ask for (default: the first of GET /v1/models)")
	f.StringVar(&b.apiKey, "api-key", "", "bearer token (default $XPYD_BENCH_API_KEY)")
	f.StringArrayVar(&b.headers, "header", nil, "NAME: VALUE to send with each request")
	f.StringVar(&b.extra, "extra", "", `JSON object of fields to send with each request, such as {"temperature":0}`)
	f.BoolVar(&b.ignoreEOS, "ignore-eos", false, "send ignore_eos, so that answers get the requested length (vLLM, SGLang, xpyd)")
	f.BoolVar(&b.noStream, "no-stream", false, "ask for whole answers: no TTFT, ITL and TPOT")
	f.BoolVar(&b.insecure, "insecure", false, "accept any certificate of an https server")
	f.IntVar(&b.requests, "requests", 0, "requests of a phase (default 200 if there is no --duration)")
	f.DurationVar(&b.duration, "duration", 0, "length of a phase")
	f.DurationVar(&b.ramp, "ramp", 0, "time over which the load grows at the start of a phase; not counted")
	f.IntVar(&b.warmup, "warmup", 0, "requests before the first phase; not counted")
	f.DurationVar(&b.timeout, "timeout", 10*time.Minute, "limit of a whole request")
	f.DurationVar(&b.drain, "drain", 30*time.Second, "how long requests may go on after --duration before they are cancelled")
	f.Uint64Var(&b.seed, "seed", 1, "of prompts, lengths and times: the same seed gives the same load")
	f.StringVar(&b.input, "input", "512", "tokens of a prompt")
	f.StringVar(&b.output, "output", "128", "tokens of an answer, max_tokens")
	f.IntVar(&b.prefix, "prefix", 0, "tokens of a prefix before each prompt")
	f.IntVar(&b.groups, "prefix-groups", 1, "number of different prefixes")
	f.Float64Var(&b.share, "prefix-share", 1, "part of the prompts with a shared prefix, 0 to 1")
	f.BoolVar(&b.calibrate, "calibrate", false, "first send two prompts to measure the server's tokens per word")
	f.StringVar(&b.slo, "slo", "", "limits of a good request: ttft=500ms,tpot=50ms,itl=200ms (longest gap),e2e=10s;\nin an open loop ttft and e2e count from the scheduled time")
	f.StringVar(&b.jsonPath, "json", "", "write the report as JSON to this file; - for standard output, instead of the text")
	f.StringVar(&b.htmlPath, "html", "", "write the report as one HTML page with plots to this file")
	f.StringVar(&b.progress, "progress", "auto", "on standard error: auto, plain (a line every 5 s) or off")
}

// check refuses invalid flags and parses those that are text.
func (b *benchFlags) check() error {
	switch {
	case len(b.urls) == 0:
		return errors.New("--url is missing")
	case b.endpoint != "chat" && b.endpoint != "completions":
		return fmt.Errorf("--endpoint %q: want chat or completions", b.endpoint)
	case b.timeout <= 0:
		return errors.New("--timeout: want more than 0")
	case b.warmup < 0 || b.prefix < 0:
		return errors.New("--warmup and --prefix: want at least 0")
	case b.groups < 1:
		return errors.New("--prefix-groups: want at least 1")
	case !(b.share >= 0 && b.share <= 1):
		return errors.New("--prefix-share: want 0 to 1")
	case !slices.Contains([]string{"auto", "plain", "off"}, b.progress):
		return fmt.Errorf("--progress %q: want auto, plain or off", b.progress)
	}
	if b.apiKey == "" {
		b.apiKey = os.Getenv("XPYD_BENCH_API_KEY")
	}
	return b.parseSLO()
}

func (b *benchFlags) parseSLO() (err error) {
	if b.limits, err = parseSLO(b.slo); err != nil {
		return err
	}
	for name, limit := range map[string]time.Duration{"ttft": b.limits.TTFT, "tpot": b.limits.TPOT, "itl": b.limits.ITL} {
		if b.noStream && limit > 0 {
			return fmt.Errorf("--slo %s: not known with --no-stream", name)
		}
	}
	return nil
}

// parseSLO reads NAME=TIME,…
func parseSLO(text string) (slo record.SLO, err error) {
	if text == "" {
		return slo, nil
	}
	limits := map[string]*time.Duration{"ttft": &slo.TTFT, "tpot": &slo.TPOT, "itl": &slo.ITL, "e2e": &slo.E2E}
	for part := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(part, "=")
		limit, err := time.ParseDuration(value)
		switch {
		case err != nil:
			return slo, fmt.Errorf("--slo %q: want NAME=TIME, such as ttft=500ms", part)
		case limit <= 0:
			return slo, fmt.Errorf("--slo %q: want a time above 0", part)
		}
		to := limits[name]
		if to == nil {
			return slo, fmt.Errorf("--slo %q is none of ttft, tpot, itl, e2e", name)
		}
		if *to > 0 {
			return slo, fmt.Errorf("--slo: %s twice", name)
		}
		*to = limit
	}
	return slo, nil
}

func (b *benchFlags) shape() (workload.Shape, error) {
	in, err := workload.ParseLengths(b.input, 1)
	if err != nil {
		return workload.Shape{}, fmt.Errorf("--input: %w", err)
	}
	out, err := workload.ParseLengths(b.output, 1)
	if err != nil {
		return workload.Shape{}, fmt.Errorf("--output: %w", err)
	}
	b.load.Input, b.load.Output = b.input, b.output
	if b.prefix > 0 {
		b.load.Prefix, b.load.Groups, b.load.Share = b.prefix, b.groups, b.share
	}
	return workload.Shape{In: in, Out: out, Prefix: b.prefix, Groups: b.groups, Share: b.share}, nil
}

// path is where requests go, below /v1.
func (b *benchFlags) path() string {
	if b.endpoint == "chat" {
		return "chat/completions"
	}
	return b.endpoint
}

func (b *benchFlags) client() (*client.Client, error) {
	cfg := client.Config{URLs: b.urls, Path: b.path(), Stream: !b.noStream, Timeout: b.timeout, Insecure: b.insecure}
	for _, h := range b.headers {
		name, value, ok := strings.Cut(h, ":")
		if !ok {
			return nil, fmt.Errorf("--header %q: want NAME: VALUE", name)
		}
		cfg.Header = append(cfg.Header, [2]string{strings.TrimSpace(name), strings.TrimSpace(value)})
	}
	if b.apiKey != "" {
		cfg.Header = append(cfg.Header, [2]string{"Authorization", "Bearer " + b.apiKey})
	}
	return client.New(cfg)
}

func (b *benchFlags) encoder() (*workload.Encoder, error) {
	extra := b.extra
	if b.ignoreEOS {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal([]byte(cmp.Or(extra, "{}")), &fields); err != nil || fields == nil {
			return nil, fmt.Errorf("--extra %s: want a JSON object", extra)
		}
		fields["ignore_eos"] = json.RawMessage("true")
		raw, err := json.Marshal(fields)
		if err != nil {
			return nil, err
		}
		extra = string(raw)
	}
	enc, err := workload.NewEncoder(b.model, extra)
	if err != nil {
		return nil, fmt.Errorf("--extra: %w", err)
	}
	enc.Chat, enc.Stream = b.endpoint == "chat", !b.noStream
	return enc, nil
}

// findModel asks the server for its model, if none is given.
func (b *benchFlags) findModel(ctx context.Context) error {
	if b.model != "" {
		return nil
	}
	base := withoutV1(b.urls[0])
	var err error
	if b.model, err = firstModel(ctx, base+"/v1/models", b.apiKey); err != nil {
		return fmt.Errorf("which model? %s/v1/models does not say: %w; give --model", base, err)
	}
	return nil
}

// withoutV1 is the address of a server that was given with or without /v1.
func withoutV1(url string) string { return strings.TrimSuffix(strings.TrimSuffix(url, "/"), "/v1") }

func firstModel(ctx context.Context, url, apiKey string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	if apiKey != "" {
		req.Header.Set("Authorization", "Bearer "+apiKey)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", errors.New(resp.Status)
	}
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list); err != nil {
		return "", err
	}
	if len(list.Data) == 0 {
		return "", errors.New("the list is empty")
	}
	return list.Data[0].ID, nil
}

// command returns the command line for the report, without secrets.
func command(cmd *cobra.Command) []string {
	line := strings.Fields(cmd.CommandPath())
	cmd.Flags().Visit(func(f *pflag.Flag) {
		value := f.Value.String()
		switch f.Name {
		case "api-key", "header":
			value = "…"
		case "url":
			urls, err := cmd.Flags().GetStringArray("url")
			if err == nil {
				value = strings.Join(urls, " --url=")
			}
		}
		line = append(line, "--"+f.Name+"="+value)
	})
	return line
}
