package planner

import (
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// Bounds are the fewest and the most workers of a role.
type Bounds struct {
	Min int `key:"min"`
	Max int `key:"max"`
}

func (b Bounds) clamp(n int) int { return min(max(n, b.Min), b.Max) }

// Config configures a Planner.
type Config struct {
	// Budget is how many GPUs the workers of all roles may have together, those that start and those
	// that drain included. A worker on a CPU counts as one.
	Budget int `key:"budget"`
	// Prefill, Decode and Whole bound the workers of each role.
	Prefill Bounds `key:"prefill"`
	Decode  Bounds `key:"decode"`
	Whole   Bounds `key:"whole"`
	// Utilisation is the part of what a worker can compute that it is to be given, 0 to 1. Where it is known
	// how many requests saw what is promised, the planner goes a little above or below it by itself.
	Utilisation float64 `key:"utilisation"`
	// Goal is the share of requests that are to see what is promised, 0 to 1.
	Goal float64 `key:"goal"`
	// CoolDown is how long fewer workers must have been enough before one goes.
	CoolDown time.Duration `key:"cool_down"`
	// StartTime is how long a worker takes to start, until the planner has seen one start.
	StartTime time.Duration `key:"start_time"`
}

// DefaultConfig is for a machine of eight GPUs.
func DefaultConfig() Config {
	return Config{Budget: 8, Prefill: Bounds{1, 64}, Decode: Bounds{1, 64}, Whole: Bounds{1, 64}, Utilisation: 0.7, Goal: 0.98,
		CoolDown: 5 * time.Minute, StartTime: time.Minute}
}

// mostWorkers bounds what a planner looks at.
const mostWorkers = 4096

// Validate returns a *config.KeyError.
func (c Config) Validate() error {
	if c.Budget < 1 || c.Budget > mostWorkers {
		return config.Bad("budget", "%d is not in 1..%d", c.Budget, mostWorkers)
	}
	for key, b := range map[string]Bounds{"prefill": c.Prefill, "decode": c.Decode, "whole": c.Whole} {
		if b.Min < 1 || b.Max < b.Min || b.Max > mostWorkers {
			return config.Bad(key, "%d to %d: want 1 <= min <= max <= %d", b.Min, b.Max, mostWorkers)
		}
	}
	switch {
	case c.Prefill.Min+c.Decode.Min > c.Budget || c.Whole.Min > c.Budget:
		return config.Bad("budget", "%d is less than the roles' min together", c.Budget)
	case !(c.Utilisation >= 0.05 && c.Utilisation <= 0.95):
		return config.Bad("utilisation", "%g is not in 0.05..0.95", c.Utilisation)
	case !(c.Goal > 0 && c.Goal < 1):
		return config.Bad("goal", "%g is not between 0 and 1", c.Goal)
	case c.CoolDown < grain || c.CoolDown > longest:
		return config.Bad("cool_down", "%v is not in %v..%v", c.CoolDown, grain, longest)
	case c.StartTime < 0 || c.StartTime > longest:
		return config.Bad("start_time", "%v is not in 0s..%v", c.StartTime, longest)
	}
	return nil
}

func (c *Config) bounds(r Role) Bounds {
	switch r {
	case Prefill:
		return c.Prefill
	case Decode:
		return c.Decode
	}
	return c.Whole
}
