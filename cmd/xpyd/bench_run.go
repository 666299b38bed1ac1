package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/xpyd/xpyd/internal/loadgen"
	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/report"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

func (b *benchFlags) run(cmd *cobra.Command, phases []loadgen.Phase, makeSource func(*workload.Text) (loadgen.Source, error)) error {
	if err := b.check(); err != nil {
		return usageError{err}
	}
	for i := range phases {
		p := &phases[i]
		p.Requests, p.Duration, p.Ramp, p.Drain, p.Seed = b.requests, b.duration, b.ramp, b.drain, b.seed
		if err := p.Validate(); err != nil {
			return usageError{fmt.Errorf("%s: %w", p.Name, err)}
		}
	}
	poster, err := b.client()
	if err != nil {
		return usageError{err}
	}
	defer poster.Abort()
	text := workload.NewText(b.seed)
	b.load.Seed = b.seed
	src, err := makeSource(text)
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	if err := b.findModel(ctx); err != nil {
		return err
	}
	enc, err := b.encoder()
	if err != nil {
		return usageError{err}
	}
	enc.IDs = text.IDs
	out, err := openReports(cmd.OutOrStdout(), b.jsonPath, b.htmlPath)
	if err != nil {
		return err
	}
	defer out.close()
	if b.calibrate {
		if err := calibrate(ctx, poster, enc, text); err != nil {
			return err
		}
		b.load.TokensPerWord = math.Round(text.PerWord*1000) / 1000
	}
	_, talks := src.(*workload.Talks)
	runner := &loadgen.Runner{Post: poster, Encode: enc, Answers: talks}
	rep := &report.Report{Schema: report.Schema, Version: build(), Started: time.Now().UTC().Truncate(time.Second), Command: command(cmd),
		Target: report.Target{URLs: b.urls, Endpoint: b.path(), Model: b.model, Stream: !b.noStream}, Load: b.load, SLO: report.NewSLO(b.limits), Notes: []string{}}
	if b.warmup > 0 {
		shape, err := b.shape()
		if err != nil {
			return usageError{err}
		}
		warm := loadgen.Phase{Name: "warm-up", Clients: min(b.warmup, phases[0].Clients, 64), Requests: b.warmup}
		rep.Phases = append(rep.Phases, b.phase(ctx, cmd.ErrOrStderr(), runner, &warm, workload.NewSynthetic(text.Other(), shape), false))
	}
	for i := range phases {
		if ctx.Err() != nil {
			break
		}
		rep.Phases = append(rep.Phases, b.phase(ctx, cmd.ErrOrStderr(), runner, &phases[i], src, true))
	}
	rep.Remark()
	if err := out.write(rep); err != nil {
		return err
	}
	for i := range rep.Phases {
		if p := &rep.Phases[i]; p.Measured && p.Requests.Completed > 0 {
			return nil
		}
	}
	return errors.New("no request completed")
}

func (b *benchFlags) phase(ctx context.Context, stderr io.Writer, runner *loadgen.Runner, p *loadgen.Phase, src loadgen.Source, measured bool) report.Phase {
	limits := record.SLO{}
	if measured {
		limits = b.limits
	}
	rec := record.NewPhase(limits, time.Now())
	stop := b.watch(stderr, p, rec)
	runner.Run(ctx, p, src, rec)
	stop()
	out := report.Phase{Name: p.Name, Measured: measured, Mode: "closed", Concurrency: p.Clients, Ramp: math.Round(p.Ramp.Seconds()*1000) / 1000}
	if p.Open {
		out.Mode, out.Arrival = "open", "trace"
		if a := p.Arrival; a != nil {
			out.RateAsked, out.Arrival = a.Rate, "poisson"
			switch {
			case math.IsInf(a.Burstiness, 1):
				out.Arrival = "fixed"
			case a.Burstiness != 1:
				out.Arrival, out.Burstiness = "gamma", a.Burstiness
			}
		}
	}
	out.Fill(rec.Stats(), limits.Any())
	return out
}

// watch shows a phase's progress until the returned function is called.
func (b *benchFlags) watch(w io.Writer, p *loadgen.Phase, rec *record.Phase) (stop func()) {
	if b.progress == "off" {
		return func() {}
	}
	show := &report.Progress{W: w, Terminal: b.progress == "auto" && isTerminal(w), Name: p.Name, Requests: p.Requests, Duration: p.Duration}
	return background(func(ctx context.Context) {
		tick := time.NewTicker(show.Every())
		defer tick.Stop()
		for {
			select {
			case at := <-tick.C:
				show.Show(rec.Now(at))
			case <-ctx.Done():
				show.End(rec.Now(time.Now()))
				return
			}
		}
	})
}

// isTerminal reports whether a stream is one.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// calibrate measures the server's tokens per word, and those that it adds. A long prompt is more
// precise, but a small model may refuse it.
func calibrate(ctx context.Context, poster *client.Client, enc *workload.Encoder, text *workload.Text) error {
	const few = 8
	count := func(words int) (int, *client.Result) {
		it := &workload.Item{Messages: []workload.Message{{Role: "user", Content: text.Probe(uint64(words), words)}}, Out: 1}
		var res client.Result
		poster.Do(ctx, &client.Request{Body: enc.Append(nil, it)}, &res)
		return res.Usage.Prompt, &res
	}
	fewTokens, res := count(few)
	many, manyTokens := 1008, 0
	if res.OK() {
		manyTokens, res = count(many)
	}
	if res.Status == http.StatusBadRequest {
		many = 88
		manyTokens, res = count(many)
	}
	if !res.OK() {
		return fmt.Errorf("--calibrate: %s: %s", res.Kind, res.Message)
	}
	if !text.Calibrate(few, fewTokens, many, manyTokens) {
		return fmt.Errorf("--calibrate: the server counts %d tokens in %d words and %d in %d", fewTokens, few, manyTokens, many)
	}
	return nil
}

// reports is where a report goes. Files are opened before the load begins.
type reports struct {
	stdout     io.Writer
	toStdout   func(*report.Report, io.Writer) error
	json, html *os.File // nil: none
}

func openReports(stdout io.Writer, jsonPath, htmlPath string) (r *reports, err error) {
	r = &reports{stdout: stdout, toStdout: (*report.Report).WriteText}
	switch jsonPath {
	case "":
	case "-":
		r.toStdout = (*report.Report).WriteJSON
	default:
		r.json, err = os.Create(jsonPath)
	}
	if err == nil && htmlPath != "" {
		r.html, err = os.Create(htmlPath)
	}
	if err != nil {
		r.close()
	}
	return r, err
}

func (r *reports) write(rep *report.Report) error {
	err := r.toStdout(rep, r.stdout)
	if r.json != nil {
		err = errors.Join(err, rep.WriteJSON(r.json), r.json.Close())
	}
	if r.html != nil {
		err = errors.Join(err, rep.WriteHTML(r.html), r.html.Close())
	}
	return err
}

// close closes the files when there is nothing to write, and does nothing after write.
func (r *reports) close() {
	r.json.Close()
	r.html.Close()
}
