package flight

import (
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// Limits is what Reload changes without dropping a request.
type Limits struct {
	// MaxInFlight requests run at once; up to MaxQueue more, of MaxQueueBytes
	// together, wait, each at most QueueWait (429 when full, 503 when late).
	MaxInFlight   int           `koanf:"max_in_flight"`
	MaxQueue      int           `koanf:"max_queue"`
	MaxQueueBytes int64         `koanf:"max_queue_bytes" unit:"bytes"`
	QueueWait     time.Duration `koanf:"queue_wait"`
	// PriorityWeights are the shares of places, and of room in the queue, that
	// requests of each priority get while they wait.
	PriorityWeights Weights `koanf:"priority_weights"`
	// PairWait is how long a request waits for a pair when there is none.
	PairWait time.Duration `koanf:"pair_wait"`
	// RequestTimeout is a request's longest life; the header
	// x-request-timeout-ms can only shorten it.
	RequestTimeout time.Duration `koanf:"request_timeout"`
}

// Weights are shares of the priorities.
type Weights struct {
	High   float64 `koanf:"high"`
	Normal float64 `koanf:"normal"`
	Low    float64 `koanf:"low"`
}

// Validate returns the first *config.KeyError.
func (l Limits) Validate() error {
	switch {
	case l.MaxInFlight < 1:
		return config.Bad("max_in_flight", "%d is below 1", l.MaxInFlight)
	case l.MaxQueue < 0:
		return config.Bad("max_queue", "%d is below 0", l.MaxQueue)
	case l.MaxQueueBytes < 0:
		return config.Bad("max_queue_bytes", "%d is below 0", l.MaxQueueBytes)
	case !l.PriorityWeights.valid():
		return config.Bad("priority_weights", "each must be within 0.001 and 1000000")
	case l.QueueWait <= 0:
		return config.Bad("queue_wait", "%v is not a positive duration", l.QueueWait)
	case l.PairWait < 0:
		return config.Bad("pair_wait", "%v is negative", l.PairWait)
	case l.RequestTimeout <= 0:
		return config.Bad("request_timeout", "%v is not a positive duration", l.RequestTimeout)
	}
	return nil
}

func (w Weights) valid() bool {
	for _, v := range []float64{w.High, w.Normal, w.Low} {
		if !(v >= 0.001 && v <= 1e6) {
			return false
		}
	}
	return true
}
