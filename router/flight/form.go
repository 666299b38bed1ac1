package flight

import (
	"bytes"
	"mime"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
)

// form reads a multipart form as it passes: which model it names, and what the engine would
// fetch. A form that engines may read differently is refused.
type form struct {
	model  string
	named  bool    // there was a part called model
	twice  bool    // there was another one, or another name than model's, or a part's name is unclear
	broken string  // what is wrong with the form; "": nothing
	fetch  []field // possible addresses; whoever has checked them empties it

	delim []byte // begins the lines between parts
	line  []byte // the current one, cut to maxToken
	value []byte // the part's, cut to maxToken
	at    formState
	meant bool   // the part's head named it model
	name  string // its last name in the head
	words bool   // it is never an address, whatever it looks like
}

type field struct{ name, value string }

type formState uint8

const (
	formSkips formState = iota
	formHead
	formValue
)

// newForm returns nil if the body is not a form.
func newForm(contentType string) *form {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" {
		return nil
	}
	f := &form{delim: []byte("--" + params["boundary"])}
	if c := params["charset"]; c != "" && !strings.EqualFold(c, "utf-8") {
		f.broken = "charset " + openai.Clip(c)
	}
	return f
}

// mayBeForm reports whether an engine may read as a form what newForm does not.
func mayBeForm(contentType string) bool {
	return strings.Contains(strings.ToLower(contentType), "form")
}

func (f *form) read(p []byte) {
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		whole := i >= 0
		if !whole {
			i = len(p) - 1
		}
		f.line = append(f.line, p[:min(i+1, maxToken-len(f.line))]...)
		p = p[i+1:]
		if f.lineIs(whole); whole {
			f.line = f.line[:0]
		}
	}
}

// lineIs handles the line; more of it may come if it is not whole.
func (f *form) lineIs(whole bool) {
	if bytes.HasPrefix(f.line, f.delim) {
		if f.at == formValue {
			f.found(string(bytes.TrimRight(f.value, "\r\n")))
		}
		f.meant = f.meant && f.at == formHead // in a head this line may be a header
		f.at, f.name, f.words = formHead, "", false
		return
	}
	switch {
	case !whole:
	case f.at == formValue:
		f.value = append(f.value, f.line[:min(len(f.line), maxToken-len(f.value))]...)
	case f.at == formHead:
		if !bytes.HasSuffix(f.line, []byte("\r\n")) && f.broken == "" { // other parsers may not end it here
			f.broken = "a part's header line is too long, or does not end with CR LF"
		}
		f.header(bytes.TrimRight(f.line, "\r\n"))
	}
}

func (f *form) header(line []byte) {
	if len(line) == 0 {
		f.at, f.value = formValue, f.value[:0]
		if f.meant {
			f.twice, f.named = f.twice || f.named, true
		}
		return
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	switch name = bytes.TrimSpace(name); {
	case bytes.EqualFold(name, []byte("Content-Disposition")):
		_, params, err := mime.ParseMediaType(string(value))
		f.twice = f.twice || err != nil // engines may read it differently
		f.meant = f.meant || params["name"] == "model"
		f.words = f.name == "" && isWords(params["name"]) && !bytes.Contains(value, []byte("*"))
		f.name = params["name"]
	case bytes.EqualFold(name, []byte("Content-Transfer-Encoding")):
		switch code := strings.ToLower(string(bytes.TrimSpace(value))); code {
		case "7bit", "8bit", "binary":
		default:
			f.broken = "Content-Transfer-Encoding " + openai.Clip(code)
		}
	}
}

// found handles a part's value, or the beginning of a long one. Files are no exception:
// only the engine decides what is one.
func (f *form) found(value string) {
	if f.meant {
		f.twice = f.twice || f.model != "" && f.model != value
		f.model = value
	}
	if named := namesURL(f.name); named && !strings.HasPrefix(value, "data:") || !f.words && !named && isAddress(value) {
		f.fetch = append(f.fetch, field{f.name, value})
	}
}

// isWords reports whether engines never fetch what a field of that name holds.
func isWords(name string) bool {
	return name == "prompt" || name == "negative_prompt" || name == "user"
}

// namesURL reports whether a field of that name is an address: url, image_url, url[],
// url[0].
func namesURL(name string) bool {
	name, _, _ = strings.Cut(strings.ToLower(name), "[")
	return name == "url" || strings.HasSuffix(name, "_url")
}

// isAddress reports whether text begins like an address, with a scheme and a slash.
func isAddress(text string) bool {
	text = strings.TrimLeftFunc(text, func(r rune) bool { return r <= ' ' })
	scheme, rest, ok := strings.Cut(text, ":")
	if !ok || scheme == "" || !strings.HasPrefix(rest, "/") {
		return false
	}
	for _, c := range scheme {
		if c > 0x7f || !strings.ContainsRune("+-.", c) && (c|0x20 < 'a' || c|0x20 > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// refusal refuses what a client may not send, as far as it has been read.
func (f *form) refusal(h hosts) *openai.Error {
	fetch := f.fetch
	f.fetch = fetch[:0]
	switch {
	case f.broken != "":
		return openai.BadRequest("", "malformed form: %s", f.broken)
	case f.twice:
		return twice()
	}
	for _, x := range fetch {
		if err := h.check(openai.Clip(x.name), strings.TrimSpace(x.value)); err != nil {
			return err
		}
	}
	return nil
}
