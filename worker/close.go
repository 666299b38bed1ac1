package worker

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// closer is one step of Close, run in reverse order of construction.
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

// Close drains and ends the worker. Until ctx ends, running requests may finish and leases
// be collected; new requests are refused. Then it leaves the fleet, ends what still runs,
// closes listeners and sessions, and frees the model. Errors name their step. A second
// call waits for the first and returns the same.
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
	for i := len(w.closers) - 1; i >= 0; i-- {
		c := &w.closers[i]
		if c.memory && len(errs) > 0 {
			break // a step that failed may still use it; the process's end frees it
		}
		if err := c.run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c.name, err))
		}
	}
	w.cancel(errClosing)
	w.wg.Wait()
	return errors.Join(errs...)
}
