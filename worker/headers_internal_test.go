package worker

import (
	"testing"

	"github.com/xpyd/xpyd/router/dialect"
)

// TestHeaders: the legs' headers have the names of router/dialect, which worker may not import.
func TestHeaders(t *testing.T) {
	for ours, theirs := range map[string]string{
		headerLink: dialect.HeaderLink, headerPrefill: dialect.HeaderPrefill, headerPrefillEpoch: dialect.HeaderPrefillEpoch,
		headerPrefillKV: dialect.HeaderPrefillKV, headerSeed: dialect.HeaderSeed, headerDeadline: dialect.HeaderDeadline,
		headerRequestID: dialect.HeaderRequestID, headerProbe: dialect.HeaderProbe, headerOutcome: dialect.HeaderOutcome,
		headerMaxAnswer: dialect.HeaderMaxAnswer, headerPeer: dialect.HeaderKVPeer, headerTokens: dialect.HeaderTokens, headerGiven: dialect.HeaderGiven, headerBrought: dialect.HeaderBrought,
		headerPromise: dialect.HeaderPromise, headerCacheSalt: dialect.HeaderCacheSalt, headerPrompt: dialect.HeaderPrompt,
	} {
		if ours != theirs {
			t.Errorf("%s is %s in router/dialect", ours, theirs)
		}
	}
}
