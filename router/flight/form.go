package flight

import (
	"bytes"
	"mime"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// form reads a multipart form that passes by: who the model is, and what the
// engine would fetch. A form that engines may read in another way is refused.
type form struct {
	model  string
	named  bool    // a part was called so
	twice  bool    // a second one was, or one is not model, if that was set, or it cannot be said how one is called
	broken string  // what is wrong with it, "" if nothing is
	fetch  []field // what may be addresses; whoever has looked at them empties it

	delim []byte // with which the lines between parts begin
	line  []byte // the present one, cut to maxToken
	value []byte // of the part, cut to maxToken
	at    formState
	meant bool   // the part's head calls it model
	name  string // what its head calls it last
	words bool   // it is text, whatever it looks like
}

// field is a part of a form that is a client's words.
type field struct{ name, value string }

type formState uint8

const (
	formSkips formState = iota
	formHead
	formValue
)

// newForm returns nil for a body that is no form.
func newForm(contentType string) *form {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" {
		return nil
	}
	f := &form{delim: []byte("--" + params["boundary"])}
	if c := params["charset"]; c != "" && !strings.EqualFold(c, "utf-8") {
		f.broken = "charset " + h1.Clip(c)
	}
	return f
}

// mayBeForm reports whether an engine may take for a form what newForm does not.
func mayBeForm(contentType string) bool {
	return strings.Contains(strings.ToLower(contentType), "form")
}

// read takes the next bytes of the body.
func (f *form) read(p []byte) {
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		whole := i >= 0
		if !whole {
			i = len(p) - 1
		}
		f.line = append(f.line, p[:min(i+1, maxToken-len(f.line))]...)
		p = p[i+1:]
		if f.has(whole); whole {
			f.line = f.line[:0]
		}
	}
}

// has looks at the line, of which more may come if it is not whole.
func (f *form) has(whole bool) {
	if bytes.HasPrefix(f.line, f.delim) {
		if f.at == formValue {
			f.found(string(bytes.TrimRight(f.value, "\r\n")))
		}
		f.meant = f.meant && f.at == formHead // there it may as well be a field's name
		f.at, f.name, f.words = formHead, "", false
		return
	}
	switch {
	case !whole:
	case f.at == formValue:
		f.value = append(f.value, f.line[:min(len(f.line), maxToken-len(f.value))]...)
	case f.at == formHead:
		if !bytes.HasSuffix(f.line, []byte("\r\n")) && f.broken == "" { // for others the head goes on
			f.broken = "a part's header line is too long, or does not end with CR LF"
		}
		f.header(bytes.TrimRight(f.line, "\r\n"))
	}
}

// header takes a line of a part's head.
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
		f.twice = f.twice || err != nil // engines may read it in another way
		f.meant = f.meant || params["name"] == "model"
		f.words = f.name == "" && isWords(params["name"]) && !bytes.Contains(value, []byte("*"))
		f.name = params["name"]
	case bytes.EqualFold(name, []byte("Content-Transfer-Encoding")):
		switch code := strings.ToLower(string(bytes.TrimSpace(value))); code {
		case "7bit", "8bit", "binary":
		default:
			f.broken = "Content-Transfer-Encoding " + h1.Clip(code)
		}
	}
}

// found takes a part's value, or the beginning of a long one. Files are looked at
// as all others: what is one is for the engine to say.
func (f *form) found(value string) {
	if f.meant {
		f.twice = f.twice || f.model != "" && f.model != value
		f.model = value
	}
	if named := namesURL(f.name); named && !strings.HasPrefix(value, "data:") || !f.words && !named && isAddress(value) {
		f.fetch = append(f.fetch, field{f.name, value})
	}
}

// isWords reports whether a field of that name is text that engines never fetch.
func isWords(name string) bool {
	return name == "prompt" || name == "negative_prompt" || name == "user"
}

// namesURL reports whether a field of that name is an address: url, image_url, url[],
// url[0].
func namesURL(name string) bool {
	name, _, _ = strings.Cut(strings.ToLower(name), "[")
	return name == "url" || strings.HasSuffix(name, "_url")
}

// isAddress reports whether text begins as an address does, with a scheme and a slash.
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

// refusal says what a client may not send, as far as it has been read.
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
		if err := h.check(h1.Clip(x.name), strings.TrimSpace(x.value)); err != nil {
			return err
		}
	}
	return nil
}
