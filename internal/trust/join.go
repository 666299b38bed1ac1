package trust

import (
	"errors"
	"strings"
)

// Join is what a worker needs to enter a fleet: where NATS is, and the fleet's secrets. It
// is one line of text, to be kept secret.
//
//	nats://user:password@10.0.0.1:4222,nats://user:password@10.0.0.2:4222#SECRET+OLDER
//
// Without a URL ("#SECRET") it is for workers behind a foreign proxy, which are in no
// fleet but trust each other.
type Join struct {
	URL     string // of NATS, comma separated; may be empty
	Secrets []Secret
}

// ParseJoin reads a line. Its errors show nothing secret.
func ParseJoin(text string) (Join, error) {
	text = strings.TrimSpace(text)
	url, tail, found := strings.Cut(text, "#")
	if !found {
		return Join{}, errors.New("it has no fleet secret: want what a router keeps in DATA/join-url, NATS_URL#SECRET")
	}
	if strings.ContainsAny(url, " \r\n\t") {
		return Join{}, errors.New("it is more than one line: want NATS_URL#SECRET")
	}
	j := Join{URL: url}
	for part := range strings.SplitSeq(tail, "+") {
		s, err := ParseSecret(part)
		if err != nil {
			return Join{}, err
		}
		j.Secrets = append(j.Secrets, s)
	}
	_, err := NewRing(j.Secrets...)
	return j, err
}

// Reveal returns the line, with its secrets.
func (j Join) Reveal() string {
	var b strings.Builder
	b.WriteString(j.URL)
	for i, s := range j.Secrets {
		b.WriteByte("#+"[min(i, 1)])
		b.WriteString(s.Reveal())
	}
	return b.String()
}
