package flight

import (
	"net/url"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// hosts are the machines that clients may have engines fetch images and the like from. An
// engine inside the network would otherwise fetch anything for anybody. Fields that say
// where prefill's blocks are get refused altogether (openai.Top.Link).
type hosts []string

// validHost reports whether s can be in the list.
func validHost(s string) bool {
	rest := strings.TrimPrefix(s, "*.")
	return s == "*" || rest != "" && s == strings.ToLower(s) && !strings.ContainsAny(rest, "*/ @?#")
}

// check refuses other addresses in the field param, and what it cannot parse, as engines
// may parse it differently.
func (h hosts) check(param string, urls ...string) *openai.Error {
	for _, s := range urls {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Contains(s, "\\") {
			return openai.BadRequest(param, "%q is no http or https address that is allowed here; send the content itself, as data:", h1.Clip(s))
		}
		if !h.has(u) {
			return openai.BadRequest(param, "engines may not fetch from %q: it is not in the router's media_hosts; send the content itself, as data:", h1.Clip(u.Host))
		}
	}
	return nil
}

func (h hosts) has(u *url.URL) bool {
	host, full := strings.ToLower(u.Hostname()), strings.ToLower(u.Host)
	for _, allowed := range h {
		domain, any := strings.CutPrefix(allowed, "*")
		switch {
		case allowed == "*", allowed == host, allowed == full:
			return true
		case any && strings.HasSuffix(host, domain):
			return true
		}
	}
	return false
}
