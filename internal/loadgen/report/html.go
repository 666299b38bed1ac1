package report

import (
	_ "embed"
	"encoding/json"
	"io"
	"strings"
)

//go:embed page.html
var page string

//go:embed page.js
var script string

//go:embed page.css
var style string

// Page writes a page whose look, in light and dark, is that of a report. parts are names such as {{DATA}}, each
// followed by its text; {{STYLE}} is there already. All are filled in at once: a name within a text stays.
func Page(w io.Writer, page string, parts ...string) error {
	_, err := strings.NewReplacer(append(parts, "{{STYLE}}", style)...).WriteString(w, page)
	return err
}

// WriteHTML writes a page that needs nothing else: the figures as JSON, and the script that
// draws them.
func (r *Report) WriteHTML(w io.Writer) error {
	data, err := json.Marshal(r) // escapes <, > and &, so it cannot end its element
	if err != nil {
		return err
	}
	return Page(w, page, "{{DATA}}", string(data), "{{SCRIPT}}", script)
}
