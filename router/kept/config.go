package kept

import (
	"cmp"
	"time"

	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/internal/config"
)

// Config bounds what is kept.
type Config struct {
	// Entries is how many responses are kept, and Bytes how much of them; the one that was used longest ago
	// goes first. 0 entries: nothing is kept.
	Entries int   `key:"entries"`
	Bytes   int64 `key:"bytes" unit:"bytes"`
	// TTL is how long a response is kept since it was last used.
	TTL time.Duration `key:"ttl"`
	// Redis keeps them instead, for all routers that name it: redis://[user:password@]host[:port][/db] and the
	// like. Its own settings bound it, and TTL does. "": this process does.
	Redis string `key:"redis" secret:"url"`
	// RedisTimeout bounds each operation of it.
	RedisTimeout time.Duration `key:"redis_timeout"`
	// Background is how many responses wait or run in the background at once, of which a key may have half; 0: none
	// may. BackgroundBytes is the memory for what they were asked, and for the events that clients may read again.
	Background      int   `key:"background"`
	BackgroundBytes int64 `key:"background_bytes" unit:"bytes"`
}

// DefaultConfig is for one machine.
func DefaultConfig() Config {
	return Config{Entries: 10_000, Bytes: 256 << 20, TTL: 24 * time.Hour, RedisTimeout: time.Second, Background: 64, BackgroundBytes: 64 << 20}
}

// Validate returns a *config.KeyError.
func (c *Config) Validate() error {
	if c.Redis != "" {
		if _, err := redis.ParseURL(c.Redis); err != nil {
			return config.Bad("redis", "%v", err)
		}
	}
	return cmp.Or(config.AtLeast("entries", c.Entries, 0), config.AtLeast("bytes", c.Bytes, 0), config.AtLeast("background", c.Background, 0),
		config.AtLeast("background_bytes", c.BackgroundBytes, 0), config.AtLeast("ttl", c.TTL, time.Second),
		config.Positive("redis_timeout", c.RedisTimeout))
}
