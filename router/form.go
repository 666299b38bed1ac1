package router

import (
	"bytes"
	"mime"
)

// form reads a multipart form that passes by: who the model is.
type form struct {
	model string
	named bool // a part was called so
	twice bool // a second one was, or one is not model, if that was set, or it cannot be said how one is called

	delim []byte // with which the lines between parts begin
	line  []byte // the present one, cut to maxToken
	value []byte // of the part, if it is the model's
	at    formState
	meant bool // the part's head calls it model
}

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
	return &form{delim: []byte("--" + params["boundary"])}
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
		f.at = formHead
		return
	}
	switch {
	case !whole:
	case f.at == formValue:
		f.value = append(f.value, f.line[:min(len(f.line), maxToken-len(f.value))]...)
	case f.at == formHead:
		f.header(bytes.TrimRight(f.line, "\r\n"))
	}
}

// header takes a line of a part's head.
func (f *form) header(line []byte) {
	if len(line) > 0 {
		name, value, _ := bytes.Cut(line, []byte(":"))
		if bytes.EqualFold(bytes.TrimSpace(name), []byte("Content-Disposition")) {
			_, params, err := mime.ParseMediaType(string(value))
			f.twice = f.twice || err != nil // engines may read it in another way
			f.meant = f.meant || params["name"] == "model"
		}
		return
	}
	if f.at = formSkips; f.meant {
		f.twice, f.named = f.twice || f.named, true
		f.at, f.value = formValue, f.value[:0]
	}
}

func (f *form) found(model string) {
	f.twice = f.twice || f.model != "" && f.model != model
	f.model = model
}
