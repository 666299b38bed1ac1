package sim

import (
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/steptable"
)

// On is a fleet without workers, whose workers will be like a table's and have an engine so configured.
func On(t *steptable.Table, e engine.Config) Config {
	cfg := DefaultConfig()
	cfg.Worker = Worker{Engine: e, Blocks: t.About.Blocks, BlockTokens: t.About.BlockTokens, Layers: t.About.Shape.Layers, Steps: t, Overlaps: t.About.Backend == "cuda"}
	cfg.KV = Link{Bytes: t.KV.BytesPerToken, Bandwidth: t.KV.Bandwidth, Latency: time.Duration(t.KV.Latency * float64(time.Second))}
	return cfg
}
