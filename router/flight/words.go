package flight

import (
	"encoding/json"
	"github.com/xpyd/xpyd/router/h1"
	"strings"
)

// Header names of the public listener, besides the dialect's.
const (
	headerDecode   = "x-xpyd-decode"
	headerFallback = "x-xpyd-fallback" // why decode served a request alone
	headerLocal    = "x-xpyd-local"    // the same, where it could have been split
	headerExplain  = "x-xpyd-explain"
	headerTimeout  = "x-request-timeout-ms"
)

// errorMessage is the message of an error body, for logs and wrapping.
func errorMessage(body []byte) string {
	var b struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &b) == nil && b.Error.Message != "" {
		return h1.Clip(b.Error.Message)
	}
	return h1.Clip(string(body))
}

func isEventStream(contentType string) bool {
	return strings.HasPrefix(contentType, "text/event-stream")
}
func isJSON(contentType string) bool { return strings.HasPrefix(contentType, "application/json") }
