package chart

import (
	_ "embed"
	"fmt"
	"html"
	"io"
	"slices"
	"strings"
)

//go:embed page.css
var pageStyle string

// Page is a report: one HTML file.
type Page struct {
	Title    string // such as "xpyd bench"
	About    string // what was measured
	Sections []Section
}

// Section is a part of a page under a heading. What it has comes in the order of its fields.
type Section struct {
	Title  string
	Folded bool // until a reader opens it
	Tiles  []Tile
	Tables []Table
	Charts []Chart
	Text   []string // paragraphs
	Code   string   // as it is
}

// Tile is a figure that stands out.
type Tile struct {
	Value, What string
	Bad         bool
}

// Table is rows of figures under a head. A row may be shorter.
type Table struct {
	Title string
	Head  []string
	Rows  [][]string
	Words []int // the columns that are text, beside the first
}

// WriteHTML writes the page. Whatever its texts are, they are text in it.
func (p *Page) WriteHTML(w io.Writer) error {
	b := &strings.Builder{}
	put := func(format string, texts ...string) {
		list := make([]any, len(texts))
		for i, s := range texts {
			list[i] = html.EscapeString(s)
		}
		fmt.Fprintf(b, format+"\n", list...)
	}
	b.WriteString("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n" +
		"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n")
	put("<title>%s</title>", strings.Trim(p.Title+": "+p.About, ": "))
	b.WriteString("<style>\n" + pageStyle + within() + "\n</style>\n</head>\n<body>\n")
	put(`<header><h1>%s</h1><label><input type="checkbox" id="other"> other theme</label><p>%s</p></header>`, p.Title, p.About)
	if len(p.Sections) > 2 {
		b.WriteString("<nav aria-label=\"Sections\">")
		for i, s := range p.Sections {
			if s.Title != "" {
				put(fmt.Sprintf(`<a href="#s-%d">%%s</a>`, i), s.Title)
			}
		}
		b.WriteString("</nav>\n")
	}
	b.WriteString("<main>\n")
	for i := range p.Sections {
		p.Sections[i].write(b, put, i)
	}
	b.WriteString("</main>\n</body>\n</html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (s *Section) write(b *strings.Builder, put func(string, ...string), i int) {
	fmt.Fprintf(b, `<section id="s-%d">`+"\n", i)
	switch {
	case s.Folded:
		put("<details><summary><h2>%s</h2></summary>", s.Title)
	case s.Title != "":
		put("<h2>%s</h2>", s.Title)
	}
	if len(s.Tiles) > 0 {
		b.WriteString("<dl class=\"tiles\">\n")
		for _, t := range s.Tiles {
			class := ""
			if t.Bad {
				class = ` class="bad"`
			}
			put("<div><dt>%s</dt><dd"+class+">%s</dd></div>", t.What, t.Value)
		}
		b.WriteString("</dl>\n")
	}
	for i := range s.Tables {
		s.Tables[i].write(b, put)
	}
	if len(s.Charts) > 0 {
		b.WriteString("<div class=\"charts\">\n")
		for i := range s.Charts {
			b.WriteString("<figure>\n")
			s.Charts[i].inPage(b, inPage)
			b.WriteString("</figure>\n")
		}
		b.WriteString("</div>\n")
	}
	for _, text := range s.Text {
		put("<p>%s</p>", text)
	}
	if s.Code != "" {
		put(`<pre tabindex="0">%s</pre>`, s.Code)
	}
	if s.Folded {
		b.WriteString("</details>\n")
	}
	b.WriteString("</section>\n")
}

// inPage is the width of a chart in a page, in its own pixels.
const inPage = 560

func (t *Table) write(b *strings.Builder, put func(string, ...string)) {
	b.WriteString("<div class=\"scroller\" tabindex=\"0\"><table>\n")
	if t.Title != "" {
		put("<caption>%s</caption>", t.Title)
	}
	row := func(cell string, cells []string) {
		b.WriteString("<tr>")
		for i := range t.Head {
			class, text := "", ""
			if slices.Contains(t.Words, i) {
				class = ` class="text"`
			}
			if i < len(cells) {
				text = html.EscapeString(cells[i])
			}
			fmt.Fprintf(b, "<%[1]s%[2]s>%[3]s</%[1]s>", cell, class, text)
		}
		b.WriteString("</tr>\n")
	}
	b.WriteString("<thead>")
	row("th", t.Head)
	b.WriteString("</thead><tbody>\n")
	for _, cells := range t.Rows {
		row("td", cells)
	}
	b.WriteString("</tbody></table></div>\n")
}
