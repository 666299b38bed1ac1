package pick

import (
	"cmp"
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// Policies.
const (
	Prefix         = "prefix"          // least loaded, less what a warm cache saves, guessed from the text (default)
	KVEvents       = "kv_events"       // the same, exact from the workers' own events where the prompt's tokens are known
	PredictedTTFT  = "predicted_ttft"  // the earliest first token, by a cost model learnt from what is measured
	LeastLoaded    = "least_loaded"    // tokens queued at prefill, sequences at decode
	LeastTokens    = "least_tokens"    // tokens at both
	RoundRobin     = "round_robin"     // least recently used
	Random         = "random"          //
	PowerOfTwo     = "power_of_two"    // the less loaded of two random ones
	ConsistentHash = "consistent_hash" // by session, else by the prompt's beginning; bounded load
	Session        = "session"         // by session, else least loaded; bounded load
)

// Policies is all of them.
var Policies = []string{Prefix, KVEvents, PredictedTTFT, LeastLoaded, LeastTokens, RoundRobin, Random, PowerOfTwo, ConsistentHash, Session}

// Ways to decide whether a request is split.
const (
	Always = "always" // whenever its dialect can
	ByCost = "cost"   // unless decode alone is predicted to be faster
	Mixed  = "mixed"  // any worker does any part, whatever its role
)

// Config configures a Picker.
type Config struct {
	// Policy is one of Policies. It can be changed while running.
	Policy string `key:"policy"`
	// AffinityBytes bounds the memory of the text prefix index.
	AffinityBytes int `key:"affinity_bytes" unit:"bytes"`
	// SlowStart is how long a newcomer's share of the work rises; 0: not at all. Round robin and
	// hashing know no shares.
	SlowStart time.Duration `key:"slow_start"`
	// TopologyLevel is how many labels of the topology, from the left, both members of a pair must
	// share. Beyond that, nearer pairs are preferred.
	TopologyLevel int `key:"topology_level"`
	// Disaggregate is Always or ByCost; LocalMaxTokens bounds the prompt tokens that ByCost may let
	// decode compute.
	Disaggregate   string `key:"disaggregate"`
	LocalMaxTokens int    `key:"local_max_tokens"`
	// Breaker and Ejection keep requests from workers that fail.
	Breaker  Breaker  `key:"breaker"`
	Ejection Ejection `key:"ejection"`
}

// DefaultConfig is the prefix policy with a 16 MiB index.
func DefaultConfig() Config {
	return Config{Policy: Prefix, AffinityBytes: 16 << 20, SlowStart: 10 * time.Second, Disaggregate: Always, LocalMaxTokens: 2048,
		Breaker: DefaultBreaker(), Ejection: DefaultEjection()}
}

// ValidPolicy refuses what SetPolicy cannot work with.
func ValidPolicy(policy string) error { return config.OneOf("policy", policy, Policies...) }

// Validate refuses what New cannot work with; the error's ConfigKey method names the key.
func (c Config) Validate() error {
	if c.TopologyLevel < 0 || c.TopologyLevel > maxLabels {
		return config.Bad("topology_level", "%d is not in 0..%d", c.TopologyLevel, maxLabels)
	}
	return cmp.Or(ValidPolicy(c.Policy), config.AtLeast("affinity_bytes", c.AffinityBytes, 0), config.AtLeast("slow_start", c.SlowStart, 0),
		config.OneOf("disaggregate", c.Disaggregate, Always, ByCost, Mixed), config.AtLeast("local_max_tokens", c.LocalMaxTokens, 0),
		config.Within("breaker", c.Breaker.validate()), config.Within("ejection", c.Ejection.validate()))
}
