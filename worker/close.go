package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// closer is a step of Close; the steps run in reverse order.
type closer struct {
	name   string
	run    func(context.Context) error
	memory bool // frees memory that other steps' goroutines use
}

func (w *Worker) later(name string, run func(context.Context) error) {
	w.closers = append(w.closers, closer{name: name, run: run})
}

func (w *Worker) free(name string, run func(context.Context) error) {
	w.closers = append(w.closers, closer{name: name, run: run, memory: true})
}

// closeGrace bounds all steps of close together. They are quick unless something hangs.
const closeGrace = 5 * time.Second

// Close drains and ends the worker. Until ctx ends, running requests may finish and leases be
// collected; new requests are refused. Then it leaves the fleet, ends what still runs, closes
// listeners and sessions, and frees the model. Errors name their step. A second call waits for the
// first and returns the same.
func (w *Worker) Close(ctx context.Context) error {
	w.ended.Do(func() { w.endErr = w.end(ctx) })
	return w.endErr
}

func (w *Worker) end(ctx context.Context) error {
	if err := w.Drain(); err != nil {
		w.log.Warn("announce drain", "error", err)
	}
	w.requests.close()
	err := w.requests.wait(ctx)
	if err == nil {
		w.prefill.Lapse()
		err = w.prefill.Idle(ctx)
	}
	if err != nil {
		w.log.Warn("drain is over", "error", err)
	}
	return w.close(ctx)
}

func (w *Worker) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
	defer cancel()
	var errs []error
	w.client.CloseIdleConnections()
	for _, c := range slices.Backward(w.closers) {
		if c.memory && len(errs) > 0 {
			break // a failed step may still use it; the end of the process frees it
		}
		if err := c.run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c.name, err))
		}
	}
	w.cancel(errClosing)
	w.wg.Wait()
	return errors.Join(errs...)
}
