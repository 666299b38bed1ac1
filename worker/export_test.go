package worker

import "context"

// CloseEngine ends the engine alone: it refuses what comes.
func (w *Worker) CloseEngine(ctx context.Context) error { return w.engine.Close(ctx) }

// Fail says why the worker must end.
func (w *Worker) Fail(err error) { w.fail(err) }
