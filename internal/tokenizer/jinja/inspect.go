package jinja

// LoopsOver reports whether the template has a for loop over an attribute or item of that
// name, or over a variable set from one. It distinguishes templates that take a message's
// content as a list of parts from those that take a string.
func (t *Template) LoopsOver(name string) bool {
	w := &walker{name: name, aliases: map[string]bool{}}
	w.walk(t.body)
	return w.found
}

type walker struct {
	name    string
	aliases map[string]bool
	found   bool
}

func (w *walker) walk(body []stmt) {
	for _, s := range body {
		switch s := s.(type) {
		case *ifStmt:
			for _, arm := range s.arms {
				w.walk(arm.body)
			}
			w.walk(s.els)
		case *forStmt:
			if w.names(s.iter) {
				w.found = true
			}
			w.walk(s.body)
			w.walk(s.els)
		case *setStmt:
			if s.x != nil && w.names(s.x) && !s.target.tuple && s.target.attr == "" {
				w.aliases[s.target.names[0]] = true
			}
			w.walk(s.body)
		case *macroStmt:
			// A macro's parameter of that name stands for what it is given.
			for _, p := range s.params {
				if p.name == w.name {
					w.aliases[p.name] = true
				}
			}
			w.walk(s.body)
		case *callStmt:
			w.walk(s.caller.body)
		case *filterStmt:
			w.walk(s.body)
		case *withStmt:
			w.walk(s.body)
		}
	}
}

func (w *walker) names(x expr) bool {
	switch x := x.(type) {
	case *nameExpr:
		return w.aliases[x.name]
	case *attrExpr:
		return x.name == w.name
	case *indexExpr:
		l, ok := x.at.(*literal)
		return ok && l.v == w.name
	case *filterExpr:
		return w.names(x.x)
	}
	return false
}
