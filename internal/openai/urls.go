package openai

import (
	"bytes"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// maxURLs bounds the addresses of one request.
const maxURLs = 1024

// fetched is raw for a value in which isURL finds, by their decoded names at any depth, members
// that hold addresses for the engine to fetch.
func (t *Top) fetched(r *reader, isURL func(key []byte) bool) []byte {
	if r.Peek() == jsonscan.Null {
		return r.raw()
	}
	from, depth := r.Pos(), r.Depth()
	for {
		k := r.Next()
		if k == jsonscan.Key {
			if isURL(r.Decoded()) && r.Peek() == jsonscan.String {
				r.Next()
				t.address(r)
			}
			continue
		}
		if k == jsonscan.None || r.Depth() <= depth {
			return r.Since(from)
		}
	}
}

// address keeps a string, unless it is the content itself (data:), which can be large.
func (t *Top) address(r *reader) {
	url := r.Decoded()
	if bytes.HasPrefix(url, []byte("data:")) {
		return
	}
	if len(t.URLs) == maxURLs {
		r.refuse("", "the body has more than %d addresses to fetch", maxURLs)
		return
	}
	t.URLs = append(t.URLs, string(url))
}

// isMediaURL reports whether that member of a content part is an address: url, image_url,
// video_url, audio_url, file_url.
func isMediaURL(key []byte) bool {
	rest, ok := bytes.CutSuffix(key, []byte("url"))
	return ok && (len(rest) == 0 || rest[len(rest)-1] == '_')
}

// isServerURL reports whether that member of a tool is the address of an mcp server.
func isServerURL(key []byte) bool { return string(key) == "server_url" }
