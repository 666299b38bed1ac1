package worker

import "context"

// CloseEngine ends the engine alone: it refuses what comes.
func (w *Worker) CloseEngine(ctx context.Context) error { return w.engine.Close(ctx) }
