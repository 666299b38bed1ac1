package pick

import (
	"fmt"
	"slices"
	"strings"
	"time"
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
)

// Config configures a Picker.
type Config struct {
	// Policy is one of Policies. It can be changed while running.
	Policy string `koanf:"policy"`
	// AffinityBytes bounds the memory of the text prefix index.
	AffinityBytes int `koanf:"affinity_bytes" unit:"bytes"`
	// SlowStart is how long a newcomer's share of the work rises; 0: not at
	// all. Round robin and hashing know no shares.
	SlowStart time.Duration `koanf:"slow_start"`
	// TopologyLevel is how many labels of the topology, from the left, both
	// members of a pair must share; beyond that nearer pairs are preferred.
	TopologyLevel int `koanf:"topology_level"`
	// Disaggregate is Always or ByCost; LocalMaxTokens bounds the prompt
	// tokens that decode may be given to compute by the latter.
	Disaggregate   string `koanf:"disaggregate"`
	LocalMaxTokens int    `koanf:"local_max_tokens"`
	// Breaker and Ejection keep requests from workers that fail.
	Breaker  Breaker  `koanf:"breaker"`
	Ejection Ejection `koanf:"ejection"`
}

// DefaultConfig is the prefix policy with a 16 MiB index.
func DefaultConfig() Config {
	return Config{Policy: Prefix, AffinityBytes: 16 << 20, SlowStart: 10 * time.Second, Disaggregate: Always, LocalMaxTokens: 2048,
		Breaker: DefaultBreaker(), Ejection: DefaultEjection()}
}

// keyError is a value that Validate refuses.
type keyError struct{ key, msg string }

func (e *keyError) Error() string     { return e.key + ": " + e.msg }
func (e *keyError) ConfigKey() string { return e.key }

// ValidPolicy refuses what SetPolicy cannot work with.
func ValidPolicy(policy string) error {
	if !slices.Contains(Policies, policy) {
		return &keyError{"policy", fmt.Sprintf("%q is none of %s", policy, strings.Join(Policies, ", "))}
	}
	return nil
}

// Validate refuses what New cannot work with; the error's ConfigKey method
// names the key.
func (c Config) Validate() error {
	if err := ValidPolicy(c.Policy); err != nil {
		return err
	}
	switch {
	case c.AffinityBytes < 0:
		return &keyError{"affinity_bytes", fmt.Sprintf("%d is negative", c.AffinityBytes)}
	case c.SlowStart < 0:
		return &keyError{"slow_start", fmt.Sprintf("%v is negative", c.SlowStart)}
	case c.TopologyLevel < 0 || c.TopologyLevel > maxLabels:
		return &keyError{"topology_level", fmt.Sprintf("%d is not in 0..%d", c.TopologyLevel, maxLabels)}
	case c.Disaggregate != Always && c.Disaggregate != ByCost:
		return &keyError{"disaggregate", fmt.Sprintf("%q is none of %s, %s", c.Disaggregate, Always, ByCost)}
	case c.LocalMaxTokens < 0:
		return &keyError{"local_max_tokens", fmt.Sprintf("%d is negative", c.LocalMaxTokens)}
	}
	if err := c.Breaker.validate(); err != nil {
		return err
	}
	return c.Ejection.validate()
}
