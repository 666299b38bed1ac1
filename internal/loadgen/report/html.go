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

// Style is the page's look, in light and dark, for other pages like it.
//
//go:embed page.css
var Style string

// WriteHTML writes a page that needs nothing else: the figures as JSON, and the script that
// draws them.
func (r *Report) WriteHTML(w io.Writer) error {
	data, err := json.Marshal(r) // escapes <, > and &, so it cannot end its element
	if err != nil {
		return err
	}
	// In one pass, so that the data is never taken for a placeholder.
	_, err = strings.NewReplacer("{{STYLE}}", Style, "{{DATA}}", string(data), "{{SCRIPT}}", script).WriteString(w, page)
	return err
}
