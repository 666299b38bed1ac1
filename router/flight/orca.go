package flight

import (
	"fmt"
	"strings"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Headers of ORCA, by which a balancer in front asks for a server's load with an answer, and gets it.
const (
	headerLoadFormat = "endpoint-load-metrics-format"
	headerLoad       = "endpoint-load-metrics"
)

// loadReport is a decode worker's load as it has announced it, in ORCA's format TEXT or JSON with vLLM's names;
// "" for other formats, and of workers that announce none.
func loadReport(format string, m *fleet.Member) string {
	if m.Dialect != fleet.Native {
		return ""
	}
	kv, waiting := m.Load.KVUsed, m.Load.Waiting
	switch strings.ToUpper(format) {
	case "TEXT":
		return fmt.Sprintf("TEXT named_metrics.kv_cache_usage_perc=%.4f, named_metrics.num_requests_waiting=%d", kv, waiting)
	case "JSON":
		return fmt.Sprintf(`JSON {"named_metrics": {"kv_cache_usage_perc": %.4f, "num_requests_waiting": %d}}`, kv, waiting)
	}
	return ""
}
