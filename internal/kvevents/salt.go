package kvevents

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

const (
	keySalt   = "xpyd-key:" // the name of an API key's cache follows
	bothSalts = "xpyd-both:"
)

// CacheSalt is the salt of our own workers' KV for a request: of whose cache its router says it is, and the
// client's own. No two pairs have the same, and who is not told of a cache cannot name another's.
func CacheSalt(cache, own string) string {
	switch {
	case cache != "" && own == "":
		return keySalt + cache
	case cache == "" && !strings.HasPrefix(own, keySalt) && !strings.HasPrefix(own, bothSalts):
		return own
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d:%s%s", len(cache), cache, own))
	return bothSalts + hex.EncodeToString(sum[:])
}

// OpenSalt reports whether a salt is no secret: it has no client's part.
func OpenSalt(salt string) bool { return salt == "" || strings.HasPrefix(salt, keySalt) }
