package openai

import "bytes"

// fetched is raw for a value in which members that isURL names are addresses
// for the engine to fetch. They are found by their decoded names, wherever they
// are in it.
func (t *Top) fetched(r *reader, isURL func(key []byte) bool) ([]byte, *Error) {
	r.isURL, r.urls = isURL, t.URLs
	raw, err := r.raw()
	t.URLs = r.urls
	r.isURL, r.urls = nil, nil
	return raw, err
}

// isMediaURL names what content parts give addresses in: url, image_url,
// video_url, audio_url, file_url.
func isMediaURL(key []byte) bool {
	rest, ok := bytes.CutSuffix(key, []byte("url"))
	return ok && (len(rest) == 0 || rest[len(rest)-1] == '_')
}

// isServerURL names where a tool of type mcp has its server. Schemas of
// functions may have any other name in them.
func isServerURL(key []byte) bool { return string(key) == "server_url" }

// member steps over a member's value, and keeps it if it is an address.
func (r *reader) member(key []byte) *Error {
	if r.isURL == nil || !r.isURL(key) || r.peek() != '"' {
		return r.skip()
	}
	raw, escaped, err := r.str()
	if err != nil {
		return err
	}
	if len(r.urls) >= maxURLs {
		return BadRequest("", "the body has more than %d addresses to fetch", maxURLs)
	}
	if escaped {
		raw = unquote(nil, raw)
	}
	if bytes.HasPrefix(raw, []byte("data:")) { // it is the content itself, and can be large
		return nil
	}
	r.urls = append(r.urls, string(raw))
	return nil
}

// maxURLs bounds the addresses of one request.
const maxURLs = 1024
