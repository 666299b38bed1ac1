package flight

import (
	"cmp"
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// Limits is what Reload changes without dropping a request.
type Limits struct {
	// MaxInFlight requests run at once; up to MaxQueue more, of MaxQueueBytes
	// together, wait, each at most QueueWait (429 when full, 503 when late).
	MaxInFlight   int           `key:"max_in_flight"`
	MaxQueue      int           `key:"max_queue"`
	MaxQueueBytes int64         `key:"max_queue_bytes" unit:"bytes"`
	QueueWait     time.Duration `key:"queue_wait"`
	// PriorityWeights are the shares of places, and of room in the queue, that
	// requests of each priority get while they wait.
	PriorityWeights Weights `key:"priority_weights"`
	// PairWait is how long a request waits for a pair when there is none.
	PairWait time.Duration `key:"pair_wait"`
	// RequestTimeout is a request's longest life; the header
	// x-request-timeout-ms can only shorten it.
	RequestTimeout time.Duration `key:"request_timeout"`
}

// Weights are shares of the priorities.
type Weights struct {
	High   float64 `key:"high"`
	Normal float64 `key:"normal"`
	Low    float64 `key:"low"`
}

// Validate returns the first *config.KeyError.
func (l Limits) Validate() error {
	for _, v := range []float64{l.PriorityWeights.High, l.PriorityWeights.Normal, l.PriorityWeights.Low} {
		if !(v >= 0.001 && v <= 1e6) {
			return config.Bad("priority_weights", "each must be within 0.001 and 1000000")
		}
	}
	return cmp.Or(config.AtLeast("max_in_flight", l.MaxInFlight, 1), config.AtLeast("max_queue", l.MaxQueue, 0),
		config.AtLeast("max_queue_bytes", l.MaxQueueBytes, 0), config.Positive("queue_wait", l.QueueWait),
		config.AtLeast("pair_wait", l.PairWait, 0), config.Positive("request_timeout", l.RequestTimeout))
}
